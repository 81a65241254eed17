// A job with its types: reads rows, entries and edge values for a kernel.
//
// Included by the kernels inside the namespace of one instruction set, after tiles.h.

// Entries by which a row is prefetched ahead of its use. On a power-law graph of 5 M edges, 128 features: none at all
// 1.7 times slower, 4 ahead 1.25 times, 12 to 40 about the same; of 10 M edges, 32 features: 12 ahead 1.1 times slower.
constexpr int64_t kAhead = 24;

template <class T, class I>
struct View {
  using Stored = T;
  using Value = Computed<T>;  // edge values and sums

  explicit View(const Job& job)
      : features(job.csr.num_features),
        heads(job.csr.num_heads),
        channels(job.csr.num_heads ? job.csr.num_features / job.csr.num_heads : 0),
        first(job.first_column),
        last(job.last_column),
        stride(job.stride),
        num_cols(job.csr.num_cols),
        num_entries(job.csr.indptr[job.csr.num_rows]),
        indptr(job.csr.indptr),
        index(static_cast<const I*>(job.csr.index)),
        weight(static_cast<const Value*>(job.csr.weight)),
        short_perm(job.csr.perm_bits == 32 ? static_cast<const int32_t*>(job.csr.perm) : nullptr),
        long_perm(job.csr.perm_bits == 64 ? static_cast<const int64_t*>(job.csr.perm) : nullptr) {}

  // The row of `dense` that entry e points to.
  template <class D>
  inline const D* row_of(const D* dense, int64_t e) const {
    return dense + static_cast<int64_t>(index[e]) * stride;
  }

  inline int64_t ahead(int64_t e) const { return e + kAhead < num_entries ? e + kAhead : e; }

  // The row to prefetch while entry e is at work; it may belong to one of the next rows of the matrix.
  template <class D>
  inline const D* row_ahead(const D* dense, int64_t e) const {
    return row_of(dense, ahead(e));
  }

  // Where the edge values of entry e begin.
  inline int64_t values_of(int64_t e) const {
    const int64_t position = short_perm ? short_perm[e] : long_perm ? long_perm[e] : e;
    return position * heads;
  }

  inline void prefetch_values(const Value* values, int64_t e) const {
    if (short_perm || long_perm) __builtin_prefetch(values + values_of(ahead(e)));
  }

  // Calls `body(head, first, last)` for the columns of each head that this job has.
  template <class Body>
  inline void for_each_head(const Body& body) const {
    for (int64_t head = first / (channels ? channels : 1); head < heads && head * channels < last; ++head) {
      const int64_t begin = head * channels > first ? head * channels : first;
      const int64_t end = (head + 1) * channels < last ? (head + 1) * channels : last;
      if (begin < end) body(head, begin, end);
    }
  }

  int64_t features, heads, channels;
  int64_t first, last, stride;
  int64_t num_cols, num_entries;
  const int64_t* indptr;
  const I* index;
  const Value* weight;
  const int32_t* short_perm;
  const int64_t* long_perm;
};

// Run-time types to template arguments: calls `body(view)` with the View that fits the job.
template <class T, class Body>
void with_index(const Job& job, const Body& body) {
  job.csr.index_bits == 32 ? body(View<T, int32_t>(job)) : body(View<T, int64_t>(job));
}

template <class Body>
void with_view(const Job& job, const Body& body) {
  job.csr.value_bits == 32 ? with_index<float>(job, body) : with_index<double>(job, body);
}
