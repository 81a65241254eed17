// What the dispatcher (dispatch.cpp) and the kernels (spmm.cpp, extrema.cpp, attention.cpp, gat.cpp, each built once per
// instruction set) agree on.
#pragma once

#include "pygdist_native.h"

namespace pygdist {

// Arguments of one call. Each kernel reads the members it needs; the C ABI documents what they hold.
struct Job {
  pygdist_csr csr;
  int32_t reduce = PYGDIST_SUM;
  int64_t first_column = 0;  // the columns of the dense matrices to work on
  int64_t last_column = 0;
  int64_t stride = 0;  // values from one row to the next in the matrix that entries point to
  bool clean = false;  // no value of x is NaN
  const void* x = nullptr;
  const void* out = nullptr;
  const void* grad = nullptr;
  const int32_t* places = nullptr;
  void* result = nullptr;
  // attention
  const void* source = nullptr;
  const void* target = nullptr;
  const void* edge = nullptr;
  const void* attention = nullptr;
  const void* above = nullptr;
  const void* facts = nullptr;
  const void* ends = nullptr;
  void* above_result = nullptr;
  double slope = 1.0;
  void* row_result = nullptr;
  bool onto = false;  // continue from the results as they are
};

// Computes rows begin..end-1 of the result. A row is always computed by one call, in entry order, so the result does
// not depend on how rows are divided among threads.
using RowsKernel = void (*)(const Job& job, int64_t begin, int64_t end);

#define PYGDIST_KERNELS(KERNEL) \
  KERNEL(spmm)                  \
  KERNEL(extremum)              \
  KERNEL(extremum_scatter)      \
  KERNEL(share_ties)            \
  KERNEL(extremum_grad)         \
  KERNEL(sddmm)                 \
  KERNEL(edge_softmax)          \
  KERNEL(edge_softmax_grad)     \
  KERNEL(sum_edges)             \
  KERNEL(gatv2_scores)          \
  KERNEL(gatv2_grad)            \
  KERNEL(gat)                   \
  KERNEL(gat_dots)              \
  KERNEL(gat_grad)

#define PYGDIST_MEMBER(name) RowsKernel name;
#define PYGDIST_FUNCTION(name) void name(const Job& job, int64_t begin, int64_t end);

struct KernelTable {
  PYGDIST_KERNELS(PYGDIST_MEMBER)
};

namespace portable {
PYGDIST_KERNELS(PYGDIST_FUNCTION)
}
namespace avx2 {
PYGDIST_KERNELS(PYGDIST_FUNCTION)
}
namespace avx512 {
PYGDIST_KERNELS(PYGDIST_FUNCTION)
}

#undef PYGDIST_MEMBER
#undef PYGDIST_FUNCTION

}  // namespace pygdist
