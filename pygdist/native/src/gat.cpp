// GAT's aggregation as one kernel: the weight of an edge is a function of two numbers per node, so it is computed where
// it is used, forward and backward, and never stored. The backward pass needs the largest score of each row and head
// and the sum of the exponentials (as one logarithm they would lose the digits of small weights), and the part of the
// result over scores above 0. Built once per instruction set, like spmm.cpp.
//
// With s = a_j + b_i, alpha = exp(leaky_relu(s) - M_i) / Z_i and out_i = sum of alpha x_j:
//   D_i      = <grad_i, out_i>                        the dot that the softmax's gradient subtracts, without any edge
//   grad s   = alpha (<grad_i, x_j> - D_i) leaky'(s)
//   grad x_j = sum over out-edges of alpha grad_i     in the same walk as grad a_j = sum of grad s
//   grad b_i = sum over in-edges of grad s = (1 - slope) (<grad_i, P_i> - D_i p_i)
// where P_i and p_i are the sums of alpha x_j and of alpha over the edges with s > 0: the rest of the derivative, slope,
// is the same for all edges of a row, over which alpha (<grad_i, x_j> - D_i) sums to 0.
#include "kernels.h"

namespace pygdist {
namespace PYGDIST_ISA {

#include "tiles.h"
#include "view.h"
#include "exp.h"

// Entries whose weights are computed at once. The backward pass reads their rows twice; with up to a hundred channels
// per head they are in the first-level cache the second time.
constexpr int kBlock = 64;

template <class T>
inline T leaky(T score, T slope) {
  return score > 0 ? score : score * slope;
}

// Replaces scores by exp(leaky_relu(score) - shift), and puts those of the positive ones into `above`.
// `scores` holds a whole number of vectors; shifts are one for all, or one for each entry.
template <class T, class Shift>
inline void weights_of(T* scores, int count, T slope, const Shift& shift, T* above) {
  constexpr int kWide = kLanes<T>;
  for (int e = 0; e < count; e += kWide) {
    using V = Vector<T, kWide>;
    const V score = load_vector<kWide>(scores + e);
    const V weight = exp_of<kWide>((score > V{} ? score : score * slope) - shift(e));
    store_vector<kWide>(scores + e, weight);
    store_vector<kWide>(above + e, score > V{} ? weight : V{});
  }
}

// Adds values[e] * row(e) over a block of entries to the columns of `sum`, and others[e] * row(e) to those of `other`.
template <bool Two, class Tile, class T, class Row>
inline void add_rows(const Tile& tile, int count, const T* values, const T* others, const Row& row, T* sum, T* other) {
  typename Tile::V total[Tile::Count], second[Tile::Count];
  for (int k = 0; k < Tile::Count; ++k) {
    total[k] = tile.load(sum, k);
    if constexpr (Two) second[k] = tile.load(other, k);
  }
  for (int e = 0; e < count; ++e) {
    const T* const from = row(e, tile);
    for (int k = 0; k < Tile::Count; ++k) {
      const auto value = tile.load(from, k);
      total[k] += value * values[e];
      if constexpr (Two) second[k] += value * others[e];
    }
  }
  for (int k = 0; k < Tile::Count; ++k) {
    tile.store(sum, k, total[k]);
    if constexpr (Two) tile.store(other, k, second[k]);
  }
}

template <bool Graded, class T, class I>
void gat_row(const View<T, I>& view, const Job& job, int64_t row) {
  const int64_t begin = view.indptr[row], end = view.indptr[row + 1];
  if (job.onto && begin == end) return;
  const T slope = static_cast<T>(job.slope);
  const T* const x = static_cast<const T*>(job.x);
  T* const out = static_cast<T*>(job.result) + row * view.features;
  T* const above_out = Graded ? static_cast<T*>(job.above_result) + row * view.features : nullptr;
  view.for_each_head([&](int64_t head, int64_t first, int64_t last) {
    const T* const source = static_cast<const T*>(job.source) + head * view.num_cols;  // by head: denser in the cache
    const T target = static_cast<const T*>(job.target)[row * view.heads + head];
    T* const facts = Graded ? static_cast<T*>(job.row_result) + (row * view.heads + head) * 3 : nullptr;
    T largest = -__builtin_inf();
    for (int64_t e = begin; e < end; ++e) {
      const T score = source[view.index[e]];
      largest = score > largest ? score : largest;
    }
    T shift = leaky(largest + target, slope);
    T total = 0, total_above = 0;
    if (Graded && job.onto && facts[1] != 0) {  // continue the sums over other entries of the row, NaN too
      shift = facts[0] > shift ? facts[0] : shift;
      total = static_cast<T>(__builtin_exp(facts[0] - shift)) / facts[1];
      total_above = facts[2] * total;
      for (int64_t f = first; f < last; ++f) out[f] *= total;
      for (int64_t f = first; f < last; ++f) above_out[f] *= total;
    } else {
      __builtin_memset(out + first, 0, (last - first) * sizeof(T));
      if constexpr (Graded) __builtin_memset(above_out + first, 0, (last - first) * sizeof(T));
    }
    for (int64_t start = begin; start < end; start += kBlock) {
      const int count = static_cast<int>(end - start < kBlock ? end - start : kBlock);
      T values[kBlock], above[kBlock];
      for (int e = 0; e < count; ++e) values[e] = source[view.index[start + e]] + target;
      for (int e = count; e % kLanes<T>; ++e) values[e] = -__builtin_inf();
      weights_of(values, count, slope, [&](int) { return shift; }, above);
      for (int e = 0; e < count; ++e) {
        total += values[e];
        total_above += above[e];
      }
      const auto row_of = [&](int e, const auto& tile) {
        tile.prefetch(view.row_ahead(x, start + e));
        return view.row_of(x, start + e);
      };
      for_each_apart<T, 4>(first, last, [&](auto tile) {
        add_rows<Graded>(tile, count, values, above, row_of, out, above_out);
      });
    }
    const T scale = begin == end ? T{0} : 1 / (total + static_cast<T>(1e-16));  // as in PyG's softmax
    for (int64_t f = first; f < last; ++f) out[f] *= scale;
    if constexpr (Graded) {
      for (int64_t f = first; f < last; ++f) above_out[f] *= scale;
      facts[0] = begin == end ? T{0} : shift;
      facts[1] = scale;
      facts[2] = total_above * scale;
    }
  });
}

// The inputs of the backward walk for each destination and head: (b_i, M_i, 1 / Z_i, D_i), one head after the other.
// Also computes the gradient of b_i. Rows are destinations here.
template <class T>
void gat_dots_row(const Job& job, int64_t row) {
  const int64_t heads = job.csr.num_heads, features = job.csr.num_features, rows = job.csr.num_rows;
  const int64_t channels = features / heads;
  const T* const grad = static_cast<const T*>(job.grad) + row * features;
  const T* const out = static_cast<const T*>(job.out) + row * features;
  const T* const above = static_cast<const T*>(job.above) + row * features;
  for (int64_t head = 0; head < heads; ++head) {
    const int64_t at = row * heads + head;
    const T* const facts = static_cast<const T*>(job.facts) + 3 * at;
    T dot = 0, dot_above = 0;
    for (int64_t f = head * channels; f < (head + 1) * channels; ++f) {
      dot += grad[f] * out[f];
      dot_above += grad[f] * above[f];
    }
    T* const end = static_cast<T*>(job.result) + (head * rows + row) * 4;
    end[0] = static_cast<const T*>(job.target)[at];
    end[1] = facts[0];
    end[2] = facts[1];
    end[3] = dot;
    static_cast<T*>(job.row_result)[at] = (1 - static_cast<T>(job.slope)) * (dot_above - dot * facts[2]);
  }
}

// Rows are sources here, and the entries point to their destinations: the rows gathered, `job.x`, are the gradient of
// the output, and `job.out` holds the rows of the sources.
template <class T, class I>
void gat_grad_row(const View<T, I>& view, const Job& job, int64_t row) {
  constexpr int kWide = kLanes<T>;
  using V = Vector<T, kWide>;
  const int64_t begin = view.indptr[row], end = view.indptr[row + 1];
  const T slope = static_cast<T>(job.slope);
  const T* const grad = static_cast<const T*>(job.x);
  const T* const x = static_cast<const T*>(job.out) + row * view.features;
  T* const grad_x = static_cast<T*>(job.result) + row * view.features;
  view.for_each_head([&](int64_t head, int64_t first, int64_t last) {
    const T* const ends = static_cast<const T*>(job.ends) + head * view.num_cols * 4;
    const T source = static_cast<const T*>(job.source)[row * view.heads + head];
    __builtin_memset(grad_x + first, 0, (last - first) * sizeof(T));
    V grad_source = {};
    for (int64_t start = begin; start < end; start += kBlock) {
      const int count = static_cast<int>(end - start < kBlock ? end - start : kBlock);
      T values[kBlock], above[kBlock], shifts[kBlock], scales[kBlock], subtracted[kBlock], dots[kBlock];
      for (int e = 0; e < count; ++e) {
        const T* const facts = ends + 4 * static_cast<int64_t>(view.index[start + e]);
        values[e] = source + facts[0];
        shifts[e] = facts[1];
        scales[e] = facts[2];
        subtracted[e] = facts[3];
      }
      for (int e = count; e % kWide; ++e) values[e] = shifts[e] = scales[e] = subtracted[e] = 0;
      weights_of(values, count, slope, [&](int e) { return load_vector<kWide>(shifts + e); }, above);
      V partial[kBlock];
      for (int e = 0; e < (count + kWide - 1) / kWide * kWide; ++e) partial[e] = V{};
      for_each_apart<T, 4>(first, last, [&](auto tile) {
        using Tile = decltype(tile);
        typename Tile::V own[Tile::Count];
        for (int k = 0; k < Tile::Count; ++k) own[k] = tile.load(x, k);
        for (int e = 0; e < count; ++e) {
          tile.prefetch(view.row_ahead(grad, start + e));
          const T* const from = view.row_of(grad, start + e);
          if constexpr (Tile::Lanes == kWide) {
            V sum = partial[e];
            for (int k = 0; k < Tile::Count; ++k) sum += own[k] * tile.load(from, k);
            partial[e] = sum;
          } else {
            T terms[kWide] = {};
            store_vector<Tile::Lanes>(terms, own[0] * tile.load(from, 0));
            partial[e] += load_vector<kWide>(terms);
          }
        }
      });
      for (int e = 0; e < (count + kWide - 1) / kWide * kWide; ++e) {
        T sum = 0;
        for (int lane = 0; lane < kWide; ++lane) sum += partial[e][lane];
        dots[e] = sum;
      }
      for (int e = 0; e < count; e += kWide) {
        const V weight = load_vector<kWide>(values + e) * load_vector<kWide>(scales + e);
        const V difference = load_vector<kWide>(dots + e) - load_vector<kWide>(subtracted + e);
        const V one = V{} + T{1};
        grad_source += weight * difference * (load_vector<kWide>(above + e) > V{} ? one : one * slope);
        store_vector<kWide>(values + e, weight);
      }
      const auto row_of = [&](int e, const auto&) { return view.row_of(grad, start + e); };
      for_each_apart<T, 4>(first, last, [&](auto tile) {
        add_rows<false>(tile, count, values, values, row_of, grad_x, grad_x);
      });
    }
    T sum = 0;
    for (int lane = 0; lane < kWide; ++lane) sum += grad_source[lane];
    static_cast<T*>(job.row_result)[row * view.heads + head] = sum;
  });
}

void gat(const Job& job, int64_t begin, int64_t end) {
  with_view(job, [&](const auto& view) {
    for (int64_t row = begin; row < end; ++row) {
      job.above_result ? gat_row<true>(view, job, row) : gat_row<false>(view, job, row);
    }
  });
}

void gat_dots(const Job& job, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    job.csr.value_bits == 32 ? gat_dots_row<float>(job, row) : gat_dots_row<double>(job, row);
  }
}

void gat_grad(const Job& job, int64_t begin, int64_t end) {
  with_view(job, [&](const auto& view) {
    for (int64_t row = begin; row < end; ++row) gat_grad_row(view, job, row);
  });
}

}  // namespace PYGDIST_ISA
}  // namespace pygdist
