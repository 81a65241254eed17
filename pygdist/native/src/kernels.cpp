// The aggregation kernels. Built once per instruction set: PYGDIST_ISA names the namespace, PYGDIST_VECTOR_BYTES the
// width of its vectors. No OpenMP and nothing of the standard library in here: an inline function compiled for AVX-512
// could otherwise be the copy that the linker keeps for the portable path.
#include "kernels.h"

namespace pygdist {
namespace PYGDIST_ISA {

#include "tiles.h"

// How many entries before its use a row is asked for. On a power-law graph of 5 M edges, 128 features: none at all 1.7
// times slower, 4 ahead 1.25 times, 24 ahead about the same.
constexpr int64_t kAhead = 12;

template <class T, class I>
struct View {
  explicit View(const Job& job)
      : features(job.csr.num_features),
        num_entries(job.csr.indptr[job.csr.num_rows]),
        mean(job.reduce == PYGDIST_MEAN),
        indptr(job.csr.indptr),
        index(static_cast<const I*>(job.csr.index)),
        weight(static_cast<const T*>(job.csr.weight)),
        x(static_cast<const T*>(job.x)),
        out(static_cast<const T*>(job.out)),
        grad(static_cast<const T*>(job.grad)),
        result(static_cast<T*>(job.result)) {}

  // The row of `dense` that entry e points to.
  inline const T* row_of(const T* dense, int64_t e) const { return dense + static_cast<int64_t>(index[e]) * features; }

  // The row to prefetch while entry e is at work; it may belong to one of the next rows of the matrix.
  inline const T* row_ahead(const T* dense, int64_t e) const {
    return row_of(dense, e + kAhead < num_entries ? e + kAhead : e);
  }

  template <bool Weighted, class V>
  inline V message(const V& value, int64_t e) const {
    if constexpr (Weighted) {
      return value * weight[e];
    } else {
      return value;
    }
  }

  int64_t features;
  int64_t num_entries;
  bool mean;
  const int64_t* indptr;
  const I* index;
  const T* weight;
  const T* x;
  const T* out;
  const T* grad;
  T* result;
};

// The mean is a sum until its end. `best != best` keeps a NaN once it is there, as torch's amax and amin do.
template <int32_t Reduce, class V>
inline V combine(const V& best, const V& value) {
  if constexpr (Reduce == PYGDIST_MAX) {
    return ((best >= value) | (best != best)) ? best : value;
  } else if constexpr (Reduce == PYGDIST_MIN) {
    return ((best <= value) | (best != best)) ? best : value;
  } else {
    return best + value;
  }
}

template <int32_t Reduce, bool Weighted, class T, class I>
void spmm_row(const View<T, I>& view, int64_t row) {
  const int64_t begin = view.indptr[row], end = view.indptr[row + 1];
  T* const result = view.result + row * view.features;
  if (begin == end) {
    __builtin_memset(result, 0, view.features * sizeof(T));
    return;
  }
  const T divisor = view.mean ? static_cast<T>(end - begin) : T{1};
  for_each_tile<T>(view.features, [&](auto tile) {
    using Tile = decltype(tile);
    typename Tile::V total[Tile::Count];
    for (int k = 0; k < Tile::Count; ++k) {
      total[k] = view.template message<Weighted>(tile.load(view.row_of(view.x, begin), k), begin);
    }
    for (int64_t e = begin + 1; e < end; ++e) {
      tile.prefetch(view.row_ahead(view.x, e));
      const T* source = view.row_of(view.x, e);
      for (int k = 0; k < Tile::Count; ++k) {
        total[k] = combine<Reduce>(total[k], view.template message<Weighted>(tile.load(source, k), e));
      }
    }
    for (int k = 0; k < Tile::Count; ++k) tile.store(result, k, total[k] / divisor);
  });
}

template <bool Weighted, class T, class I>
void share_ties_row(const View<T, I>& view, int64_t row) {
  const T* const out = view.out + row * view.features;
  const T* const grad = view.grad + row * view.features;
  T* const share = view.result + row * view.features;
  for_each_tile<T>(view.features, [&](auto tile) {
    using Tile = decltype(tile);
    using V = typename Tile::V;
    const V zero = V{}, one = zero + T{1};
    V best[Tile::Count], count[Tile::Count];
    for (int k = 0; k < Tile::Count; ++k) {
      best[k] = tile.load(out, k);
      count[k] = (best[k] == zero) ? one : zero;
    }
    for (int64_t e = view.indptr[row]; e < view.indptr[row + 1]; ++e) {
      tile.prefetch(view.row_ahead(view.x, e));
      const T* source = view.row_of(view.x, e);
      for (int k = 0; k < Tile::Count; ++k) {
        const V value = view.template message<Weighted>(tile.load(source, k), e);
        count[k] += (value == best[k]) ? one : zero;
      }
    }
    for (int k = 0; k < Tile::Count; ++k) tile.store(share, k, tile.load(grad, k) / count[k]);
  });
}

// `row` is a source here and the entries lead to its destinations; `grad` holds their shares.
template <bool Weighted, class T, class I>
void extremum_grad_row(const View<T, I>& view, int64_t row) {
  const T* const x = view.x + row * view.features;
  T* const grad_x = view.result + row * view.features;
  for_each_tile<T>(view.features, [&](auto tile) {
    using Tile = decltype(tile);
    using V = typename Tile::V;
    const V zero = V{};
    V value[Tile::Count], total[Tile::Count];
    for (int k = 0; k < Tile::Count; ++k) {
      value[k] = tile.load(x, k);
      total[k] = zero;
    }
    for (int64_t e = view.indptr[row]; e < view.indptr[row + 1]; ++e) {
      tile.prefetch(view.row_ahead(view.out, e));
      tile.prefetch(view.row_ahead(view.grad, e));
      const T* best = view.row_of(view.out, e);
      const T* share = view.row_of(view.grad, e);
      for (int k = 0; k < Tile::Count; ++k) {
        const V message = view.template message<Weighted>(value[k], e);
        const V gradient = view.template message<Weighted>(tile.load(share, k), e);
        total[k] += (message == tile.load(best, k)) ? gradient : zero;
      }
    }
    for (int k = 0; k < Tile::Count; ++k) tile.store(grad_x, k, total[k]);
  });
}

// One product of the dot product of an entry, or 0 where another entry attained the extremum.
template <bool Masked, bool Weighted, class T, class I, class V>
inline V dot_term(const View<T, I>& view, int64_t e, const V& x, const V& grad, const V& out) {
  if constexpr (Masked) {
    return (view.template message<Weighted>(x, e) == out) ? x * grad : V{};
  } else {
    return x * grad;
  }
}

template <bool Masked, bool Weighted, class T, class I>
void sddmm_row(const View<T, I>& view, int64_t row) {
  constexpr int kCount = 4;  // independent sums, so that additions need not wait for each other
  using Full = Tile<T, kLanes<T>, kCount>;
  using V = typename Full::V;
  const T* const grad = view.grad + row * view.features;
  const T* const out = Masked ? view.out + row * view.features : grad;
  for (int64_t e = view.indptr[row]; e < view.indptr[row + 1]; ++e) {
    const T* const x = view.row_of(view.x, e);
    const T* const ahead = view.row_ahead(view.x, e);
    V sum[kCount] = {};
    int64_t f = 0;
    for (; f + kCount * Full::Lanes <= view.features; f += kCount * Full::Lanes) {
      const Full tile{f};
      tile.prefetch(ahead);
      for (int k = 0; k < kCount; ++k) {
        sum[k] += dot_term<Masked, Weighted>(view, e, tile.load(x, k), tile.load(grad, k), tile.load(out, k));
      }
    }
    __builtin_prefetch(ahead + f);
    for (; f + Full::Lanes <= view.features; f += Full::Lanes) {
      const Tile<T, Full::Lanes, 1> tile{f};
      sum[0] += dot_term<Masked, Weighted>(view, e, tile.load(x, 0), tile.load(grad, 0), tile.load(out, 0));
    }
    const V lanes = (sum[0] + sum[1]) + (sum[2] + sum[3]);
    T total = 0;
    for (int lane = 0; lane < Full::Lanes; ++lane) total += lanes[lane];
    for (; f < view.features; ++f) total += dot_term<Masked, Weighted>(view, e, x[f], grad[f], out[f]);
    view.result[e] = total;
  }
}

// Run-time types to template arguments: calls `body(view)` with the View that fits the job.
template <class Body>
void with_view(const Job& job, const Body& body) {
  const bool small_index = job.csr.index_bits == 32;
  if (job.csr.value_bits == 32) {
    small_index ? body(View<float, int32_t>(job)) : body(View<float, int64_t>(job));
  } else {
    small_index ? body(View<double, int32_t>(job)) : body(View<double, int64_t>(job));
  }
}

template <int32_t Reduce>
void spmm_rows(const Job& job, int64_t begin, int64_t end) {
  with_view(job, [&](const auto& view) {
    for (int64_t row = begin; row < end; ++row) {
      view.weight ? spmm_row<Reduce, true>(view, row) : spmm_row<Reduce, false>(view, row);
    }
  });
}

void spmm(const Job& job, int64_t begin, int64_t end) {
  switch (job.reduce) {
    case PYGDIST_MAX: return spmm_rows<PYGDIST_MAX>(job, begin, end);
    case PYGDIST_MIN: return spmm_rows<PYGDIST_MIN>(job, begin, end);
    default: return spmm_rows<PYGDIST_SUM>(job, begin, end);
  }
}

void share_ties(const Job& job, int64_t begin, int64_t end) {
  with_view(job, [&](const auto& view) {
    for (int64_t row = begin; row < end; ++row) {
      view.weight ? share_ties_row<true>(view, row) : share_ties_row<false>(view, row);
    }
  });
}

void extremum_grad(const Job& job, int64_t begin, int64_t end) {
  with_view(job, [&](const auto& view) {
    for (int64_t row = begin; row < end; ++row) {
      view.weight ? extremum_grad_row<true>(view, row) : extremum_grad_row<false>(view, row);
    }
  });
}

void sddmm(const Job& job, int64_t begin, int64_t end) {
  with_view(job, [&](const auto& view) {
    for (int64_t row = begin; row < end; ++row) {
      if (!view.out) {
        sddmm_row<false, false>(view, row);
      } else {
        view.weight ? sddmm_row<true, true>(view, row) : sddmm_row<true, false>(view, row);
      }
    }
  });
}

extern const KernelTable kernels;
const KernelTable kernels = {spmm, share_ties, extremum_grad, sddmm};

}  // namespace PYGDIST_ISA
}  // namespace pygdist
