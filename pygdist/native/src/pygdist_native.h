// The C ABI of libpygdist_native: all that crosses the border between Python and C++.
//
// Plain C types only, no torch and no Python header, so one build serves every version of both. Arrays are dense and
// row-major. Nothing is kept between calls. The caller guarantees that indices are in range and arrays long enough;
// nothing is checked again here. Raise PYGDIST_ABI_VERSION whenever a signature or a struct changes.
#ifndef PYGDIST_NATIVE_H
#define PYGDIST_NATIVE_H

#include <stdint.h>

#define PYGDIST_ABI_VERSION 1
#define PYGDIST_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

// A sparse matrix in CSR form, the type and width of the dense rows it meets, and the threads to use.
typedef struct pygdist_csr {
  int64_t num_rows;
  int64_t num_features;   // columns of every dense matrix of the call
  const int64_t* indptr;  // num_rows + 1 offsets, the first one 0
  const void* index;      // column of each entry
  const void* weight;     // value of each entry, or null for all ones
  int32_t index_bits;     // 32 or 64: signed integers in `index`
  int32_t value_bits;     // 32 or 64: IEEE floats in `weight` and in the dense matrices
  int32_t num_threads;
} pygdist_csr;

typedef enum pygdist_reduce { PYGDIST_SUM = 0, PYGDIST_MEAN = 1, PYGDIST_MAX = 2, PYGDIST_MIN = 3 } pygdist_reduce;

typedef enum pygdist_status { PYGDIST_OK = 0, PYGDIST_BAD_TYPE = 1, PYGDIST_BAD_REDUCE = 2 } pygdist_status;

// Instruction sets, in ascending order. PYGDIST_ISA_BEST stands for the best one that this machine has.
typedef enum pygdist_isa {
  PYGDIST_ISA_BEST = -1,
  PYGDIST_ISA_PORTABLE = 0,
  PYGDIST_ISA_AVX2 = 1,
  PYGDIST_ISA_AVX512 = 2
} pygdist_isa;

PYGDIST_API int32_t pygdist_abi_version(void);

// Chooses the code path of later calls, for tests and measurements; capped at what the machine has. Returns the choice.
PYGDIST_API int32_t pygdist_set_isa(int32_t level);

// out[i] = reduce over entries (i, j) of weight_ij * x[j]; rows without entries become 0.
PYGDIST_API int32_t pygdist_spmm(const pygdist_csr* csr, int32_t reduce, const void* x, void* out);

// For max and min: share[i] = grad_out[i] / number of entries that attain out[i], feature by feature. An `out` of
// exactly 0 counts once more, as in torch.scatter_reduce, whose initial zero takes part in the tie.
PYGDIST_API int32_t pygdist_share_ties(const pygdist_csr* csr, const void* x, const void* out, const void* grad_out,
                                       void* share);

// For max and min, over the transposed matrix: grad_x[j] = sum of weight_ij * share[i] where weight_ij * x[j] is out[i].
PYGDIST_API int32_t pygdist_extremum_grad(const pygdist_csr* transposed, const void* x, const void* out,
                                          const void* share, void* grad_x);

// grad_weight[e] = <x[j], grad[i]> for each entry e = (i, j). With `out` not null, only over those features where
// weight_ij * x[j] is out[i] (max and min).
PYGDIST_API int32_t pygdist_sddmm(const pygdist_csr* csr, const void* x, const void* grad, const void* out,
                                  void* grad_weight);

#ifdef __cplusplus
}
#endif

#endif  // PYGDIST_NATIVE_H
