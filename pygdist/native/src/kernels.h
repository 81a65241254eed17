// What the dispatcher (dispatch.cpp) and the kernels (kernels.cpp, built once per instruction set) agree on.
#pragma once

#include "pygdist_native.h"

namespace pygdist {

// Arguments of one call. Each kernel reads the members it needs; the C ABI documents what they hold.
struct Job {
  pygdist_csr csr;
  int32_t reduce = PYGDIST_SUM;
  const void* x = nullptr;
  const void* out = nullptr;
  const void* grad = nullptr;
  void* result = nullptr;
};

// Computes rows begin..end-1 of the result. A row is always computed by one call, in entry order, so the result does
// not depend on how rows are dealt to threads.
using RowsKernel = void (*)(const Job& job, int64_t begin, int64_t end);

struct KernelTable {
  RowsKernel spmm;
  RowsKernel share_ties;
  RowsKernel extremum_grad;
  RowsKernel sddmm;
};

namespace portable {
extern const KernelTable kernels;
}
namespace avx2 {
extern const KernelTable kernels;
}
namespace avx512 {
extern const KernelTable kernels;
}

}  // namespace pygdist
