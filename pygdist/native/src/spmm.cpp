// The sparse product and its gradients. Built once per instruction set: PYGDIST_ISA names the namespace,
// PYGDIST_VECTOR_BYTES the width of its vectors. No OpenMP and nothing of the standard library in here: an inline
// function compiled for AVX-512 could otherwise be the copy that the linker keeps for the portable path.
#include "kernels.h"

namespace pygdist {
namespace PYGDIST_ISA {

#include "tiles.h"
#include "view.h"
#include "message.h"

// A compile-time flag, so that a loop without permutation or heads does not test for them at every entry.
struct Plain {
  template <class View>
  static inline int64_t values_of(const View&, int64_t e) {
    return e;
  }
};
struct General {
  template <class View>
  static inline int64_t values_of(const View& view, int64_t e) {
    view.prefetch_values(view.weight, e);
    return view.values_of(e);
  }
};

// Entries of a narrow row go to several sums in turn, so that an addition need not wait for the last one.
constexpr int kAdditions = 4;
// Rows of up to so many bytes are not prefetched if columns have 16 bits: 65,536 of them are in a near cache.
constexpr int kNarrow = 64;

template <bool Onto, int32_t Op, class Values, class T, class I>
void spmm_row(const View<T, I>& view, const Job& job, int64_t row) {
  using Value = Computed<T>;
  const T* const x = static_cast<const T*>(job.x);
  T* const result = static_cast<T*>(job.result) + row * view.features;
  const int64_t begin = view.indptr[row], end = view.indptr[row + 1];
  if (begin == end) {
    if constexpr (!Onto) __builtin_memset(result + view.first, 0, (view.last - view.first) * sizeof(T));
    return;
  }
  const Value divisor = job.reduce == PYGDIST_MEAN ? static_cast<Value>(end - begin) : Value{1};
  view.for_each_head([&](int64_t head, int64_t first, int64_t last) {
    for_each_tile<T, Widths::kAny>(first, last, [&](auto tile) {
      using Tile = decltype(tile);
      using V = typename Tile::V;
      constexpr int kApart = kAdditions / Tile::Count;
      constexpr bool kAsk = sizeof(I) > 2 || Tile::Count * Tile::Lanes * sizeof(T) > kNarrow;
      const Value* const values = Op == PYGDIST_COPY ? nullptr : view.weight + head;
      V total[Tile::Count];
      Value value = edge_value<Op>(view, begin, head);
      for (int k = 0; k < Tile::Count; ++k) {
        total[k] = message<Op>(tile.load(view.row_of(x, begin), k), value);
        if constexpr (Onto) total[k] += tile.load(result, k);
      }
      const auto take = [&](int64_t e, V* sums) {
        if constexpr (kAsk) tile.prefetch(view.row_ahead(x, e));
        const T* const source = tile.part(view.row_of(x, e));
        if constexpr (Op != PYGDIST_COPY) value = values[Values::values_of(view, e)];
        for (int k = 0; k < Tile::Count; ++k) {
          sums[k] += message<Op>(tile.load_part(source, k), value);
        }
      };
      int64_t e = begin + 1;
      if constexpr (kApart > 1) {
        V apart[kApart][Tile::Count] = {};
        for (; e + kApart <= end; e += kApart) {
          for (int part = 0; part < kApart; ++part) take(e + part, apart[part]);
        }
        for (int part = 0; part < kApart; ++part) {
          for (int k = 0; k < Tile::Count; ++k) total[k] += apart[part][k];
        }
      }
      for (; e < end; ++e) take(e, total);
      for (int k = 0; k < Tile::Count; ++k) {
        if constexpr (Onto) {
          tile.store_own(result, k, total[k]);
        } else {
          tile.store(result, k, total[k] / divisor);
        }
      }
    });
  });
}

// One term of the gradient of an edge value: d message / d value times `grad`, or 0 where the message lost to another.
template <bool Masked, int32_t Op, class V, class T>
inline V value_gradient(const V& x, const V& grad, const V& out, T value) {
  const V term = Op == PYGDIST_ADD ? grad : x * grad;
  if constexpr (Masked) {
    return (message<Op>(x, value) == out) ? term : V{};
  } else {
    return term;
  }
}

template <bool Masked, int32_t Op, class T, class I>
void sddmm_row(const View<T, I>& view, const Job& job, int64_t row) {
  constexpr int kCount = 4;  // independent sums, so that additions need not wait for each other
  constexpr int kWide = kCount * kLanes<T>;
  using Value = Computed<T>;
  using V = Vector<Value, kLanes<T>>;
  const T* const x = static_cast<const T*>(job.x);
  const T* const grad = static_cast<const T*>(job.grad) + row * view.features;
  const T* const out = Masked ? static_cast<const T*>(job.out) + row * view.features : grad;
  Value* const result = static_cast<Value*>(job.result);
  for (int64_t e = view.indptr[row]; e < view.indptr[row + 1]; ++e) {
    const T* const source = view.row_of(x, e);
    const T* const ahead = view.row_ahead(x, e);
    for (int64_t head = 0; head < view.heads; ++head) {
      const int64_t last = (head + 1) * view.channels;
      int64_t f = head * view.channels;
      const Value value = Masked ? edge_value<Op>(view, e, head) : Value{1};
      V sum[kCount] = {};
      const auto add = [&](auto tile) {
        for (int k = 0; k < tile.Count; ++k) {
          sum[k] += value_gradient<Masked, Op>(tile.load(source, k), tile.load(grad, k), tile.load(out, k), value);
        }
      };
      for (; f + kWide <= last; f += kWide) {
        const Tile<T, kLanes<T>, kCount> tile{f};
        tile.prefetch(ahead);
        add(tile);
      }
      __builtin_prefetch(ahead + f);
      for (; f + kLanes<T> <= last; f += kLanes<T>) add(Tile<T, kLanes<T>, 1>{f});
      const V lanes = (sum[0] + sum[1]) + (sum[2] + sum[3]);
      Value total = 0;
      for (int lane = 0; lane < kLanes<T>; ++lane) total += lanes[lane];
      for (; f < last; ++f) {
        const auto one = [f](const T* dense) { return load_vector<1>(dense + f); };
        total += value_gradient<Masked, Op>(one(source), one(grad), one(out), value);
      }
      result[view.values_of(e) + head] = total;
    }
  }
}

template <bool Onto, int32_t Op>
void spmm_rows(const Job& job, int64_t begin, int64_t end) {
  const auto rows = [&](const auto& view) {
    if constexpr (Op != PYGDIST_ADD) {  // rare: compiled in one form
      if (view.heads == 1 && !job.csr.perm) {
        for (int64_t row = begin; row < end; ++row) spmm_row<Onto, Op, Plain>(view, job, row);
        return;
      }
    }
    for (int64_t row = begin; row < end; ++row) spmm_row<Onto, Op, General>(view, job, row);
  };
  if constexpr (Op == PYGDIST_COPY) {
    if (job.csr.index_bits == 16) {
      return job.csr.value_bits == 32 ? rows(View<float, uint16_t>(job)) : rows(View<double, uint16_t>(job));
    }
  }
  if (job.csr.value_bits == 16) return with_index<bf16>(job, rows);
  with_view(job, rows);
}

template <bool Onto>
void spmm_ops(const Job& job, int64_t begin, int64_t end) {
  switch (job.csr.op) {
    case PYGDIST_MUL: return spmm_rows<Onto, PYGDIST_MUL>(job, begin, end);
    case PYGDIST_ADD: return spmm_rows<Onto, PYGDIST_ADD>(job, begin, end);
    default: return spmm_rows<Onto, PYGDIST_COPY>(job, begin, end);
  }
}

// The mean is a sum until its end.
void spmm(const Job& job, int64_t begin, int64_t end) {
  job.reduce == PYGDIST_ONTO ? spmm_ops<true>(job, begin, end) : spmm_ops<false>(job, begin, end);
}

template <bool Masked>
void sddmm_rows(const Job& job, int64_t begin, int64_t end) {
  const auto rows = [&](const auto& view) {
    for (int64_t row = begin; row < end; ++row) {
      job.csr.op == PYGDIST_ADD ? sddmm_row<Masked, PYGDIST_ADD>(view, job, row)
                                : sddmm_row<Masked, PYGDIST_MUL>(view, job, row);
    }
  };
  if constexpr (!Masked) {
    if (job.csr.value_bits == 16) return with_index<bf16>(job, rows);
  }
  with_view(job, rows);
}

void sddmm(const Job& job, int64_t begin, int64_t end) {
  job.out ? sddmm_rows<true>(job, begin, end) : sddmm_rows<false>(job, begin, end);
}

}  // namespace PYGDIST_ISA
}  // namespace pygdist
