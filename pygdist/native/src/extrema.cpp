// Maxima and minima, the entries that attain them, and their gradients. Built once per instruction set, as spmm.cpp.
#include "kernels.h"

namespace pygdist {
namespace PYGDIST_ISA {

#include "tiles.h"
#include "view.h"
#include "message.h"

// A whole number beside each value of a vector: 32 bits beside a float, 64 beside a double.
template <class V>
struct WholeOf {
  using type = decltype(V{} != V{});
};
template <>
struct WholeOf<float> {
  using type = int32_t;
};
template <>
struct WholeOf<double> {
  using type = int64_t;
};

template <int Lanes, class Whole>
inline void store_places(int32_t* to, const Whole& places) {
  const auto narrow = [&] {
    if constexpr (Lanes == 1) {
      return static_cast<int32_t>(places);
    } else {
      return __builtin_convertvector(places, Vector<int32_t, Lanes>);
    }
  }();
  __builtin_memcpy(to, &narrow, sizeof(narrow));
}

template <int32_t Reduce, class V>
inline auto beats(const V& value, const V& best) {
  if constexpr (Reduce == PYGDIST_MAX) return value > best;
  if constexpr (Reduce == PYGDIST_MIN) return value < best;
}

template <int32_t Reduce, class V>
inline auto reaches(const V& value, const V& best) {
  if constexpr (Reduce == PYGDIST_MAX) return value >= best;
  if constexpr (Reduce == PYGDIST_MIN) return value <= best;
}

// True if a comparison of vectors holds in any lane.
template <class Mask>
inline bool any(const Mask& mask) {
  if constexpr (sizeof(mask) < 8) {
    return mask;
  } else {
    uint64_t words[sizeof(mask) / 8], all = 0;
    __builtin_memcpy(words, &mask, sizeof(mask));
    for (const uint64_t word : words) all |= word;
    return all;
  }
}

template <class Mask>
inline bool lane_of(const Mask& mask, int lane) {
  if constexpr (sizeof(mask) < 8) {
    return mask;
  } else {
    return mask[lane];
  }
}

inline int32_t* places_of(const Job& job, int64_t row) {
  return static_cast<int32_t*>(job.row_result) + row * job.csr.num_features;
}

// In a tile of a row, so many extrema are looked at to tell if exactly two entries attain them: a look costs as much as
// many vectors. The others get PYGDIST_SEVERAL, and the backward pass looks.
constexpr int kPairsSought = 4;

// The NaN among the messages of column f of a row if there is one; it is the extremum then. The sum of the messages is
// also NaN if both infinities are among them.
template <bool Placed, int32_t Op, class T, class I>
__attribute__((noinline)) void settle_nan(const View<T, I>& view, const Job& job, int64_t row, int64_t f) {
  const T* const x = static_cast<const T*>(job.x);
  for (int64_t e = view.indptr[row]; e < view.indptr[row + 1]; ++e) {
    const T found = message<Op>(view.row_of(x, e)[f], edge_value<Op>(view, e, f / view.channels));
    if (found == found) continue;
    static_cast<T*>(job.result)[row * view.features + f] = found;
    if constexpr (Placed) places_of(job, row)[f] = PYGDIST_NOWHERE;
    return;
  }
}

// The place of the extremum of column f of a row, which more than one entry may attain.
template <int32_t Op, class T, class I>
__attribute__((noinline)) int32_t settle_tie(const View<T, I>& view, const Job& job, int64_t row, int64_t f) {
  const T* const x = static_cast<const T*>(job.x);
  const T out = static_cast<const T*>(job.result)[row * view.features + f];
  const int64_t begin = view.indptr[row], end = view.indptr[row + 1];
  int64_t entries[2], count = 0;
  for (int64_t e = begin; e < end && end - begin <= PYGDIST_PAIR_BASE; ++e) {
    if (message<Op>(view.row_of(x, e)[f], edge_value<Op>(view, e, f / view.channels)) != out) continue;
    if (count < 2) entries[count] = e - begin;
    if (++count > 2) break;
  }
  return count == 2 ? static_cast<int32_t>(PYGDIST_PAIRS + entries[0] * PYGDIST_PAIR_BASE + entries[1]) : PYGDIST_SEVERAL;
}

// Columns of a row. Vectors compare without regard to NaN, which may be lost then; but the sum of all messages is NaN if
// one of them is. (It also is if both infinities are among them, or after an overflow; that costs a second look.)
// `Clean` says that no message is NaN.
//
// `place` is the source of the last entry that attains the extremum; if op multiplies, the entry's position in the row.
// `next` is the second-best message: it equals the best one if several entries attain that (or if all are infinite).
template <int32_t Reduce, bool Placed, bool Clean, int32_t Op, class Tile, class T, class I>
void extremum_tile(const View<T, I>& view, const Job& job, int64_t row, int64_t head, const Tile& tile) {
  using V = typename Tile::V;
  using Whole = typename WholeOf<V>::type;
  const T* const x = static_cast<const T*>(job.x);
  const int64_t begin = view.indptr[row], end = view.indptr[row + 1];
  const auto name = [&](int64_t e) {
    return Whole{} + static_cast<typename WholeOf<T>::type>(Op == PYGDIST_MUL ? e - begin : view.index[e]);
  };
  V best[Tile::Count], next[Tile::Count], sum[Tile::Count];
  Whole place[Tile::Count] = {};
  const T value = edge_value<Op>(view, begin, head);
  for (int k = 0; k < Tile::Count; ++k) {
    sum[k] = best[k] = message<Op>(tile.load(view.row_of(x, begin), k), value);
    next[k] = V{} + (Reduce == PYGDIST_MAX ? -static_cast<T>(__builtin_inf()) : static_cast<T>(__builtin_inf()));
    if constexpr (Placed) place[k] = name(begin);
  }
  for (int64_t e = begin + 1; e < end; ++e) {
    tile.prefetch(view.row_ahead(x, e));
    const T* const source = tile.part(view.row_of(x, e));
    const T value = edge_value<Op>(view, e, head);
    Whole here = {};
    if constexpr (Placed) compute_once(here = name(e));
    for (int k = 0; k < Tile::Count; ++k) {
      const V found = message<Op>(tile.load_part(source, k), value);
      if constexpr (Placed) {
        const V lesser = beats<Reduce>(found, best[k]) ? best[k] : found;
        next[k] = beats<Reduce>(next[k], lesser) ? next[k] : lesser;
        place[k] = reaches<Reduce>(found, best[k]) ? here : place[k];
      }
      best[k] = beats<Reduce>(best[k], found) ? best[k] : found;
      if constexpr (!Clean) sum[k] += found;
    }
  }
  int tied = 0;
  for (int k = 0; k < Tile::Count; ++k) {
    const int64_t column = tile.first + tile.column(k);
    tile.store(static_cast<T*>(job.result) + row * view.features, k, best[k]);
    if constexpr (Placed) {
      int32_t* const places = places_of(job, row) + column;
      store_places<Tile::Lanes>(places, place[k]);
      const auto tie = next[k] == best[k];
      for (int lane = 0; any(tie) && lane < Tile::Lanes; ++lane) {
        if (!lane_of(tie, lane)) continue;
        places[lane] = ++tied > kPairsSought ? PYGDIST_SEVERAL : settle_tie<Op>(view, job, row, column + lane);
      }
    }
    if constexpr (!Clean) {
      const auto nan = sum[k] != sum[k];
      for (int lane = 0; any(nan) && lane < Tile::Lanes; ++lane) {
        if (lane_of(nan, lane)) settle_nan<Placed, Op>(view, job, row, column + lane);
      }
    }
  }
}

// The extrema of a row and, if `Placed`, where each was found.
template <int32_t Reduce, bool Placed, int32_t Op, class T, class I>
void extremum_row(const View<T, I>& view, const Job& job, int64_t row) {
  T* const result = static_cast<T*>(job.result) + row * view.features;
  int32_t* const places = Placed ? places_of(job, row) : nullptr;
  if (view.indptr[row] == view.indptr[row + 1]) {
    __builtin_memset(result + view.first, 0, (view.last - view.first) * sizeof(T));
    for (int64_t f = view.first; Placed && f < view.last; ++f) places[f] = PYGDIST_NOWHERE;
    return;
  }
  view.for_each_head([&](int64_t head, int64_t first, int64_t last) {
    for_each_tile<T>(first, last, [&](const auto& tile) {
      if constexpr (Op == PYGDIST_COPY) {
        if (job.clean) return extremum_tile<Reduce, Placed, true, Op>(view, job, row, head, tile);
      }
      extremum_tile<Reduce, Placed, false, Op>(view, job, row, head, tile);
    });
  });
}

// Adds the gradients of a row's extrema to the sources begin..end-1 that attain them: one, two, or more.
template <int32_t Op, class T, class I>
void extremum_scatter_row(const View<T, I>& view, const Job& job, int64_t row, int64_t begin, int64_t end) {
  const T* const x = static_cast<const T*>(job.x);
  const T* const out = static_cast<const T*>(job.out) + row * view.features;
  const T* const grad = static_cast<const T*>(job.grad) + row * view.features;
  const int32_t* const places = job.places + row * view.features;
  T* const grad_x = static_cast<T*>(job.result);
  const int64_t soon = 16 * view.features + view.first;  // processors do not foresee a few columns of each row
  __builtin_prefetch(out + soon);
  __builtin_prefetch(grad + soon);
  __builtin_prefetch(places + soon);
  // the places of row + 2, whose gradients are prefetched
  const int32_t* const next = Op != PYGDIST_MUL && row + 2 < job.csr.num_rows ? places + 2 * view.features : nullptr;
  const int64_t first_entry = view.indptr[row], last_entry = view.indptr[row + 1];
  view.for_each_head([&](int64_t head, int64_t first, int64_t last) {
    for (int64_t f = first; f < last; ++f) {
      if (next && next[f] >= begin && next[f] < end) __builtin_prefetch(grad_x + next[f] * view.features + f, 1);
      const auto add_to = [&](int64_t source, T gradient) {
        if (source >= begin && source < end) grad_x[source * view.features + f] += gradient;
      };
      const auto add = [&](int64_t e, T share) {
        add_to(view.index[e], row_gradient<Op>(share, edge_value<Op>(view, e, head)));
      };
      const auto attains = [&](int64_t e) {
        const T source = x[view.index[e] * view.features + f];
        return message<Op>(source, edge_value<Op>(view, e, head)) == out[f];
      };
      const T lost = out[f] == 0 ? 1 : 0;
      if (places[f] >= 0) {
        const T share = grad[f] / (1 + lost);
        Op == PYGDIST_MUL ? add(first_entry + places[f], share) : add_to(places[f], share);
      } else if (places[f] == PYGDIST_SEVERAL) {
        T count = lost;
        for (int64_t e = first_entry; e < last_entry; ++e) count += attains(e);
        for (int64_t e = first_entry; e < last_entry; ++e) {
          if (attains(e)) add(e, grad[f] / count);
        }
      } else if (places[f] != PYGDIST_NOWHERE) {
        const int64_t pair = places[f] - PYGDIST_PAIRS;
        add(first_entry + pair / PYGDIST_PAIR_BASE, grad[f] / (2 + lost));
        add(first_entry + pair % PYGDIST_PAIR_BASE, grad[f] / (2 + lost));
      }
    }
  });
}

template <int32_t Op, class T, class I>
void share_ties_row(const View<T, I>& view, const Job& job, int64_t row) {
  using Value = Computed<T>;
  const T* const x = static_cast<const T*>(job.x);
  const T* const out = static_cast<const T*>(job.out) + row * view.features;
  const T* const grad = static_cast<const T*>(job.grad) + row * view.features;
  T* const share = static_cast<T*>(job.result) + row * view.features;
  const int64_t begin = view.indptr[row], end = view.indptr[row + 1];
  view.for_each_head([&](int64_t head, int64_t first, int64_t last) {
    for_each_tile<T>(first, last, [&](auto tile) {
      using Tile = decltype(tile);
      using V = typename Tile::V;
      const V zero = V{}, one = zero + Value{1};
      V best[Tile::Count], count[Tile::Count];
      for (int k = 0; k < Tile::Count; ++k) {
        best[k] = tile.load(out, k);
        count[k] = (best[k] == zero) ? one : zero;
      }
      for (int64_t e = begin; e < end; ++e) {
        tile.prefetch(view.row_ahead(x, e));
        const T* const source = tile.part(view.row_of(x, e));
        const Value value = edge_value<Op>(view, e, head);
        for (int k = 0; k < Tile::Count; ++k) {
          count[k] += (message<Op>(tile.load_part(source, k), value) == best[k]) ? one : zero;
        }
      }
      for (int k = 0; k < Tile::Count; ++k) tile.store(share, k, tile.load(grad, k) / count[k]);
    });
  });
}

// `row` is a source here and the entries point to its destinations; `grad` holds their shares.
template <int32_t Op, class T, class I>
void extremum_grad_row(const View<T, I>& view, const Job& job, int64_t row) {
  using Value = Computed<T>;
  const T* const x = static_cast<const T*>(job.x) + row * view.features;
  const T* const out = static_cast<const T*>(job.out);
  const T* const grad = static_cast<const T*>(job.grad);
  T* const grad_x = static_cast<T*>(job.result) + row * view.features;
  const int64_t begin = view.indptr[row], end = view.indptr[row + 1];
  view.for_each_head([&](int64_t head, int64_t first, int64_t last) {
    for_each_tile<T>(first, last, [&](auto tile) {
      using Tile = decltype(tile);
      using V = typename Tile::V;
      const V zero = V{};
      V own[Tile::Count], total[Tile::Count];
      for (int k = 0; k < Tile::Count; ++k) {
        own[k] = tile.load(x, k);
        total[k] = zero;
      }
      for (int64_t e = begin; e < end; ++e) {
        tile.prefetch(view.row_ahead(out, e));
        tile.prefetch(view.row_ahead(grad, e));
        const T* const best = tile.part(view.row_of(out, e));
        const T* const share = tile.part(view.row_of(grad, e));
        const Value value = edge_value<Op>(view, e, head);
        for (int k = 0; k < Tile::Count; ++k) {
          const V gradient = row_gradient<Op>(tile.load_part(share, k), value);
          total[k] += (message<Op>(own[k], value) == tile.load_part(best, k)) ? gradient : zero;
        }
      }
      for (int k = 0; k < Tile::Count; ++k) tile.store(grad_x, k, total[k]);
    });
  });
}

// The operator as a type, to be a template argument in turn.
template <int32_t Op>
struct OpOf {
  static constexpr int32_t value = Op;
};

// Run-time types and operator to template arguments: calls `body(view, op)` with the View and the OpOf that fit the job.
template <class Body>
void with_op(const Job& job, const Body& body) {
  with_view(job, [&](const auto& view) {
    switch (job.csr.op) {
      case PYGDIST_MUL: return body(view, OpOf<PYGDIST_MUL>{});
      case PYGDIST_ADD: return body(view, OpOf<PYGDIST_ADD>{});
      default: return body(view, OpOf<PYGDIST_COPY>{});
    }
  });
}

template <int32_t Reduce, bool Placed>
void extremum_rows(const Job& job, int64_t begin, int64_t end) {
  with_op(job, [&](const auto& view, auto op) {
    for (int64_t row = begin; row < end; ++row) extremum_row<Reduce, Placed, op.value>(view, job, row);
  });
}

template <int32_t Reduce>
void extremum_reduce(const Job& job, int64_t begin, int64_t end) {
  job.row_result ? extremum_rows<Reduce, true>(job, begin, end) : extremum_rows<Reduce, false>(job, begin, end);
}

void extremum(const Job& job, int64_t begin, int64_t end) {
  job.reduce == PYGDIST_MIN ? extremum_reduce<PYGDIST_MIN>(job, begin, end)
                            : extremum_reduce<PYGDIST_MAX>(job, begin, end);
}

// Rows begin..end-1 are sources here; the entries of all rows are looked at.
void extremum_scatter(const Job& job, int64_t begin, int64_t end) {
  with_op(job, [&](const auto& view, auto op) {
    const int64_t bytes = job.csr.value_bits / 8;
    for (int64_t row = begin; row < end; ++row) {
      char* const own = static_cast<char*>(job.result) + (row * view.features + view.first) * bytes;
      __builtin_memset(own, 0, (view.last - view.first) * bytes);
    }
    for (int64_t row = 0; row < job.csr.num_rows; ++row) {
      extremum_scatter_row<op.value>(view, job, row, begin, end);
    }
  });
}

void share_ties(const Job& job, int64_t begin, int64_t end) {
  with_op(job, [&](const auto& view, auto op) {
    for (int64_t row = begin; row < end; ++row) share_ties_row<op.value>(view, job, row);
  });
}

void extremum_grad(const Job& job, int64_t begin, int64_t end) {
  with_op(job, [&](const auto& view, auto op) {
    for (int64_t row = begin; row < end; ++row) extremum_grad_row<op.value>(view, job, row);
  });
}

}  // namespace PYGDIST_ISA
}  // namespace pygdist
