// Attention over the in-edges of each destination: scores, their softmax, and the gradients. No kernel makes a tensor
// of edges times channels; rows of edge values are `num_heads` wide. Built once per instruction set, like spmm.cpp.
#include "kernels.h"

namespace pygdist {
namespace PYGDIST_ISA {

#include "tiles.h"
#include "view.h"
#include "exp.h"

constexpr int kHeadBlock = 16;  // heads whose sums are kept at once

// Calls `body(first, count)` for groups of at most kHeadBlock heads.
template <class Body>
inline void for_each_head_block(int64_t heads, const Body& body) {
  for (int64_t first = 0; first < heads; first += kHeadBlock) {
    body(first, heads - first < kHeadBlock ? static_cast<int>(heads - first) : kHeadBlock);
  }
}

// The additive score of one entry and head, before the leaky ReLU; arrays that are null count as zeros.
template <class T, class I>
inline T additive_score(const View<T, I>& view, const Job& job, int64_t row, int64_t e, int64_t head) {
  T score = 0;
  if (job.source) score += static_cast<const T*>(job.source)[view.index[e] * view.heads + head];
  if (job.target) score += static_cast<const T*>(job.target)[row * view.heads + head];
  if (job.edge) score += static_cast<const T*>(job.edge)[e * view.heads + head];
  return score;
}

template <class T, class I>
void edge_softmax_row(const View<T, I>& view, const Job& job, int64_t row) {
  const int64_t begin = view.indptr[row], end = view.indptr[row + 1], heads = view.heads;
  const T slope = static_cast<T>(job.slope);
  T* const alpha = static_cast<T*>(job.result);
  for_each_head_block(heads, [&](int64_t first, int count) {
    T largest[kHeadBlock];
    for (int h = 0; h < count; ++h) largest[h] = -__builtin_inf();
    for (int64_t e = begin; e < end; ++e) {
      if (job.source) __builtin_prefetch(static_cast<const T*>(job.source) + view.index[view.ahead(e)] * heads + first);
      for (int h = 0; h < count; ++h) {
        const T score = additive_score(view, job, row, e, first + h);
        const T value = score > 0 ? score : score * slope;
        alpha[e * heads + first + h] = value;
        largest[h] = value > largest[h] ? value : largest[h];
      }
    }
    for (int64_t e = begin; e < end; ++e) {
      for (int h = 0; h < count; ++h) alpha[e * heads + first + h] -= largest[h];
    }
  });
  exp_in_place(alpha + begin * heads, (end - begin) * heads);
  for_each_head_block(heads, [&](int64_t first, int count) {
    T total[kHeadBlock] = {};
    for (int64_t e = begin; e < end; ++e) {
      for (int h = 0; h < count; ++h) total[h] += alpha[e * heads + first + h];
    }
    for (int h = 0; h < count; ++h) total[h] += static_cast<T>(1e-16);  // as in PyG's softmax
    for (int64_t e = begin; e < end; ++e) {
      for (int h = 0; h < count; ++h) alpha[e * heads + first + h] /= total[h];
    }
  });
}

template <class T, class I>
void edge_softmax_grad_row(const View<T, I>& view, const Job& job, int64_t row) {
  const int64_t begin = view.indptr[row], end = view.indptr[row + 1], heads = view.heads;
  const T slope = static_cast<T>(job.slope);
  const T* const alpha = static_cast<const T*>(job.out);
  const T* const grad = static_cast<const T*>(job.grad);
  T* const grad_score = static_cast<T*>(job.result);
  T* const grad_target = static_cast<T*>(job.row_result);
  for_each_head_block(heads, [&](int64_t first, int count) {
    T dot[kHeadBlock] = {}, total[kHeadBlock] = {};
    for (int64_t at = begin * heads + first; at < end * heads; at += heads) {
      for (int h = 0; h < count; ++h) dot[h] += alpha[at + h] * grad[at + h];
    }
    for (int64_t e = begin; e < end; ++e) {
      if (job.source) __builtin_prefetch(static_cast<const T*>(job.source) + view.index[view.ahead(e)] * heads + first);
      for (int h = 0; h < count; ++h) {
        const int64_t at = e * heads + first + h;
        const T factor = additive_score(view, job, row, e, first + h) > 0 ? 1 : slope;
        grad_score[at] = alpha[at] * (grad[at] - dot[h]) * factor;
        total[h] += grad_score[at];
      }
    }
    for (int h = 0; h < count; ++h) grad_target[row * heads + first + h] = total[h];
  });
}

template <class T, class I>
void sum_edges_row(const View<T, I>& view, const Job& job, int64_t row) {
  const T* const values = view.weight;
  T* const result = static_cast<T*>(job.result) + row * view.heads;
  for_each_head_block(view.heads, [&](int64_t first, int count) {
    T total[kHeadBlock] = {};
    for (int64_t e = view.indptr[row]; e < view.indptr[row + 1]; ++e) {
      view.prefetch_values(values, e);
      const T* const value = values + view.values_of(e) + first;
      for (int h = 0; h < count; ++h) total[h] += value[h];
    }
    for (int h = 0; h < count; ++h) result[first + h] = total[h];
  });
}

template <class V, class T>
inline V leaky_relu(const V& value, T slope) {
  return value > V{} ? value : value * slope;
}

template <class T, class I>
void gatv2_scores_row(const View<T, I>& view, const Job& job, int64_t row) {
  using V = Vector<T, kLanes<T>>;
  const T slope = static_cast<T>(job.slope);
  const T* const source = static_cast<const T*>(job.source);
  const T* const target = static_cast<const T*>(job.target) + row * view.features;
  const T* const attention = static_cast<const T*>(job.attention);
  T* const scores = static_cast<T*>(job.result);
  for (int64_t e = view.indptr[row]; e < view.indptr[row + 1]; ++e) {
    const T* const x = view.row_of(source, e);
    const T* const ahead = view.row_ahead(source, e);
    for (int64_t head = 0; head < view.heads; ++head) {
      const int64_t last = (head + 1) * view.channels;
      int64_t f = head * view.channels;
      V lanes = {};
      for (; f + kLanes<T> <= last; f += kLanes<T>) {
        const Tile<T, kLanes<T>, 1> tile{f};
        tile.prefetch(ahead);
        lanes += leaky_relu(tile.load(x, 0) + tile.load(target, 0), slope) * tile.load(attention, 0);
      }
      T total = 0;
      for (int lane = 0; lane < kLanes<T>; ++lane) total += lanes[lane];
      for (; f < last; ++f) total += leaky_relu(x[f] + target[f], slope) * attention[f];
      scores[e * view.heads + head] = total;
    }
  }
}

// The gradient of the destination `row` (`target`); its entries point to the sources (`source`). With the transposed
// matrix the two change places.
template <class T, class I>
void gatv2_grad_row(const View<T, I>& view, const Job& job, int64_t row) {
  const T slope = static_cast<T>(job.slope);
  const T* const source = static_cast<const T*>(job.source);
  const T* const target = static_cast<const T*>(job.target) + row * view.features;
  const T* const attention = static_cast<const T*>(job.attention);
  T* const grad_target = static_cast<T*>(job.result) + row * view.features;
  T* const grad_attention = job.row_result ? static_cast<T*>(job.row_result) + row * view.features : nullptr;
  view.for_each_head([&](int64_t head, int64_t first, int64_t last) {
    for_each_tile<T>(first, last, [&](auto wide) {
      // three sums per vector: fewer vectors than other kernels keep in registers
      constexpr int kCount = wide.Count > 4 ? 4 : wide.Count;
      using Part = Tile<T, decltype(wide)::Lanes, kCount>;
      using V = typename Part::V;
      for (int64_t from = wide.first; from < wide.first + wide.Count * wide.Lanes; from += kCount * wide.Lanes) {
        const Part tile{from};
        V own[kCount], total[kCount] = {}, attended[kCount] = {};
        for (int k = 0; k < kCount; ++k) own[k] = tile.load(target, k);
        for (int64_t e = view.indptr[row]; e < view.indptr[row + 1]; ++e) {
          tile.prefetch(view.row_ahead(source, e));
          view.prefetch_values(view.weight, e);
          const T* const other = view.row_of(source, e);
          const T grad = view.weight[view.values_of(e) + head];
          for (int k = 0; k < kCount; ++k) {
            const V sum = own[k] + tile.load(other, k);
            const V one = V{} + T{1};
            const V factor = (sum > V{} ? one : one * slope) * grad;
            total[k] += factor;
            attended[k] += factor * sum;
          }
        }
        for (int k = 0; k < kCount; ++k) tile.store(grad_target, k, total[k] * tile.load(attention, k));
        if (!grad_attention) continue;
        for (int k = 0; k < kCount; ++k) tile.store(grad_attention, k, attended[k]);
      }
    });
  });
}

void edge_softmax(const Job& job, int64_t begin, int64_t end) {
  with_view(job, [&](const auto& view) {
    for (int64_t row = begin; row < end; ++row) edge_softmax_row(view, job, row);
  });
}

void edge_softmax_grad(const Job& job, int64_t begin, int64_t end) {
  with_view(job, [&](const auto& view) {
    for (int64_t row = begin; row < end; ++row) edge_softmax_grad_row(view, job, row);
  });
}

void sum_edges(const Job& job, int64_t begin, int64_t end) {
  with_view(job, [&](const auto& view) {
    for (int64_t row = begin; row < end; ++row) sum_edges_row(view, job, row);
  });
}

void gatv2_scores(const Job& job, int64_t begin, int64_t end) {
  with_view(job, [&](const auto& view) {
    for (int64_t row = begin; row < end; ++row) gatv2_scores_row(view, job, row);
  });
}

void gatv2_grad(const Job& job, int64_t begin, int64_t end) {
  with_view(job, [&](const auto& view) {
    for (int64_t row = begin; row < end; ++row) gatv2_grad_row(view, job, row);
  });
}

}  // namespace PYGDIST_ISA
}  // namespace pygdist
