// The C ABI: checks the type codes, picks the kernels for this machine and deals rows to OpenMP threads.
#include <algorithm>
#include <atomic>

#include "kernels.h"

namespace pygdist {
namespace {

int32_t best_isa() {
#ifdef PYGDIST_HAVE_X86
  __builtin_cpu_init();
  const bool fma = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (fma && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw")) {
    return PYGDIST_ISA_AVX512;
  }
  if (fma) return PYGDIST_ISA_AVX2;
#endif
  return PYGDIST_ISA_PORTABLE;
}

std::atomic<int32_t>& chosen_isa() {
  static std::atomic<int32_t> level{best_isa()};
  return level;
}

const KernelTable& kernels() {
#ifdef PYGDIST_HAVE_X86
  if (chosen_isa() == PYGDIST_ISA_AVX512) return avx512::kernels;
  if (chosen_isa() == PYGDIST_ISA_AVX2) return avx2::kernels;
#endif
  return portable::kernels;
}

// Entries and rows before `row`. Rows count too: an empty one still has to be written.
int64_t work_before(const pygdist_csr& csr, int64_t row) { return csr.indptr[row] + row; }

// The first row at or after which `share` of `shares` of the work is done.
int64_t chunk_start(const pygdist_csr& csr, int64_t share, int64_t shares) {
  const int64_t total = work_before(csr, csr.num_rows);
  const int64_t target = total / shares * share + total % shares * share / shares;
  int64_t low = 0, high = csr.num_rows;
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (work_before(csr, middle) < target) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

// Runs a kernel over all rows, in chunks of equal work that idle threads take one by one: on a power-law graph a few
// rows hold most entries, so equal numbers of rows would leave threads waiting.
void run(RowsKernel kernel, const Job& job) {
  constexpr int64_t kChunksPerThread = 32;
  constexpr int64_t kSmallestChunk = 1 << 14;  // values touched; below that, waking a thread costs more
  const int64_t values = work_before(job.csr, job.csr.num_rows) * std::max<int64_t>(job.csr.num_features, 1);
  const int64_t threads = std::max<int64_t>(job.csr.num_threads, 1);
  const int64_t chunks = std::min({threads * kChunksPerThread, values / kSmallestChunk + 1, job.csr.num_rows});
  if (threads == 1 || chunks <= 1) {
    kernel(job, 0, job.csr.num_rows);
    return;
  }
#pragma omp parallel for schedule(dynamic, 1) num_threads(static_cast<int>(threads))
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    kernel(job, chunk_start(job.csr, chunk, chunks), chunk_start(job.csr, chunk + 1, chunks));
  }
}

bool known_types(const pygdist_csr& csr) {
  return (csr.index_bits == 32 || csr.index_bits == 64) && (csr.value_bits == 32 || csr.value_bits == 64);
}

}  // namespace
}  // namespace pygdist

using pygdist::Job;

extern "C" {

int32_t pygdist_abi_version(void) { return PYGDIST_ABI_VERSION; }

int32_t pygdist_set_isa(int32_t level) {
  const int32_t best = pygdist::best_isa();
  const int32_t choice = level < PYGDIST_ISA_PORTABLE ? best : std::min(level, best);
  pygdist::chosen_isa() = choice;
  return choice;
}

int32_t pygdist_spmm(const pygdist_csr* csr, int32_t reduce, const void* x, void* out) {
  if (!pygdist::known_types(*csr)) return PYGDIST_BAD_TYPE;
  if (reduce < PYGDIST_SUM || reduce > PYGDIST_MIN) return PYGDIST_BAD_REDUCE;
  Job job{*csr};
  job.reduce = reduce;
  job.x = x;
  job.result = out;
  pygdist::run(pygdist::kernels().spmm, job);
  return PYGDIST_OK;
}

int32_t pygdist_share_ties(const pygdist_csr* csr, const void* x, const void* out, const void* grad_out, void* share) {
  if (!pygdist::known_types(*csr)) return PYGDIST_BAD_TYPE;
  Job job{*csr};
  job.x = x;
  job.out = out;
  job.grad = grad_out;
  job.result = share;
  pygdist::run(pygdist::kernels().share_ties, job);
  return PYGDIST_OK;
}

int32_t pygdist_extremum_grad(const pygdist_csr* transposed, const void* x, const void* out, const void* share,
                              void* grad_x) {
  if (!pygdist::known_types(*transposed)) return PYGDIST_BAD_TYPE;
  Job job{*transposed};
  job.x = x;
  job.out = out;
  job.grad = share;
  job.result = grad_x;
  pygdist::run(pygdist::kernels().extremum_grad, job);
  return PYGDIST_OK;
}

int32_t pygdist_sddmm(const pygdist_csr* csr, const void* x, const void* grad, const void* out, void* grad_weight) {
  if (!pygdist::known_types(*csr)) return PYGDIST_BAD_TYPE;
  Job job{*csr};
  job.x = x;
  job.out = out;
  job.grad = grad;
  job.result = grad_weight;
  pygdist::run(pygdist::kernels().sddmm, job);
  return PYGDIST_OK;
}

}  // extern "C"
