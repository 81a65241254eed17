// Messages of entries and their gradients.
//
// Included by the kernels inside the namespace of one instruction set, after view.h.

// The message of entry e, from the row that it points to; `value` is its edge value.
template <int32_t Op, class V, class T>
inline V message(const V& row, T value) {
  if constexpr (Op == PYGDIST_MUL) {
    return row * value;
  } else if constexpr (Op == PYGDIST_ADD) {
    return row + value;
  } else {
    return row;
  }
}

// The gradient of a message with respect to the row, times `grad`.
template <int32_t Op, class V, class T>
inline V row_gradient(const V& grad, T value) {
  if constexpr (Op == PYGDIST_MUL) return grad * value;
  return grad;
}

template <int32_t Op, class View>
inline typename View::Value edge_value(const View& view, int64_t e, int64_t head) {
  if constexpr (Op == PYGDIST_COPY) return 1;
  return view.weight[view.values_of(e) + head];
}
