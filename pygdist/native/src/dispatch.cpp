// The C ABI: checks the type codes, picks the kernels for this machine and divides rows among OpenMP threads.
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <new>

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

KernelTable kernels() {
#define PYGDIST_ENTRY(name) PYGDIST_TABLE::name,
#ifdef PYGDIST_HAVE_X86
#define PYGDIST_TABLE avx512
  if (chosen_isa() == PYGDIST_ISA_AVX512) return {PYGDIST_KERNELS(PYGDIST_ENTRY)};
#undef PYGDIST_TABLE
#define PYGDIST_TABLE avx2
  if (chosen_isa() == PYGDIST_ISA_AVX2) return {PYGDIST_KERNELS(PYGDIST_ENTRY)};
#undef PYGDIST_TABLE
#endif
#define PYGDIST_TABLE portable
  return {PYGDIST_KERNELS(PYGDIST_ENTRY)};
#undef PYGDIST_TABLE
#undef PYGDIST_ENTRY
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

// Asks for pages of 2 MiB where a large result will be written. Fresh memory costs a fault for every page: at 4 KiB a sum
// over 400,000 nodes of 128 features took 10 to 20% longer. This is advice: without such pages results are the same.
void expect_writes(void* data, int64_t bytes) {
#ifdef MADV_HUGEPAGE
  constexpr uintptr_t kLargePage = uintptr_t{2} << 20;
  const auto start = (reinterpret_cast<uintptr_t>(data) + kLargePage - 1) / kLargePage * kLargePage;
  const auto end = (reinterpret_cast<uintptr_t>(data) + static_cast<uintptr_t>(bytes)) / kLargePage * kLargePage;
  if (data && start < end) madvise(reinterpret_cast<void*>(start), end - start, MADV_HUGEPAGE);
#else
  (void)data, (void)bytes;
#endif
}

constexpr int64_t kSmallestChunk = 1 << 14;  // values touched; below that, waking a thread costs more

// Runs a kernel over all rows, in chunks of equal work that idle threads take one by one: on a power-law graph a few
// rows hold most entries, so equal numbers of rows would leave threads waiting.
void run(RowsKernel kernel, Job& job) {
  constexpr int64_t kChunksPerThread = 32;
  if (!job.last_column) job.last_column = job.csr.num_features;
  if (!job.stride) job.stride = job.csr.num_features;
  const int64_t values = work_before(job.csr, job.csr.num_rows) * std::max<int64_t>(job.last_column - job.first_column, 1);
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

// The same for kernels that read no entries: all rows are equal.
void run_rows(RowsKernel kernel, const Job& job) {
  constexpr int64_t kRows = 512;
  const int64_t threads = std::max<int64_t>(job.csr.num_threads, 1);
#pragma omp parallel for schedule(dynamic, 1) num_threads(static_cast<int>(threads)) if (job.csr.num_rows > kRows)
  for (int64_t row = 0; row < job.csr.num_rows; row += kRows) {
    kernel(job, row, std::min(row + kRows, job.csr.num_rows));
  }
}

std::atomic<int64_t> chosen_cache{0};

// Bytes of the last-level cache, or a common size if the system does not report it. Not from sysconf(), which adds up
// the caches of a whole socket on some processors.
int64_t cache_bytes() {
  if (const int64_t chosen = chosen_cache) return chosen;
  static const int64_t found = [] {
    long kib = 0;
    if (FILE* const file = std::fopen("/sys/devices/system/cpu/cpu0/cache/index3/size", "r")) {
      if (std::fscanf(file, "%ldK", &kib) != 1) kib = 0;
      std::fclose(file);
    }
    return static_cast<int64_t>(kib) << 10;
  }();
  return found > 0 ? found : int64_t{16} << 20;
}

constexpr int64_t kLineBytes = 64;
constexpr int64_t kSlabBytes = 128;  // two cache lines of a row; one alone is slower by a half, four by as much

constexpr int64_t kOften = 8;                 // entries per column from which on a pass over the matrix costs little
constexpr int64_t kSmall = int64_t{1} << 20;  // bytes of a matrix whose rows are near enough as they are

// The same for sums and for extrema whose rows are whole slabs. With 10,000 nodes and 5 M entries, whole rows and slabs
// took 5.5 and 6.0 ms (sums, 64 columns), 12.0 and 13.3 ms (maxima, 128 columns); 27.5 and 23.0 ms (sums, 256 columns,
// more than a quarter of the cache).
int64_t small_for_whole_rows() { return cache_bytes() / 4; }

// True if a product is faster slab by slab: a few columns of every row, copied side by side, stay in the cache where
// whole rows do not (blocking over sources as in DistGNN's Algorithm 2, but over columns, so that sums stay in
// registers). The copy costs one pass over `x`, the index is read once per slab.
bool worth_slabs(const pygdist_csr& csr, int64_t slab_bytes = kSlabBytes, int64_t matrices = 1, int64_t often = kOften,
                 int64_t small = kSmall) {
  const int64_t row_bytes = csr.num_features * csr.value_bits / 8;
  const int64_t entries = csr.indptr[csr.num_rows];
  const bool wide = row_bytes >= 2 * slab_bytes || slab_bytes == kLineBytes;
  return wide && entries >= often * csr.num_cols &&
         csr.num_cols * slab_bytes * matrices <= cache_bytes() / 2 &&
         csr.num_cols * row_bytes * matrices > small;
}

// The bytes of a slab of sums: a row slightly longer than a cache line takes two; cut after the first line, the rests
// of several rows share one.
int64_t sum_slab(const pygdist_csr& csr) {
  const int64_t row_bytes = csr.num_features * csr.value_bits / 8;
  return row_bytes > kLineBytes && row_bytes <= kLineBytes * 3 / 2 ? kLineBytes : kSlabBytes;
}

// GAT computes weights for half of its time, and each slab reads the scores again: slabs pay off only if their rows are
// read more often.
constexpr int64_t kOftenGat = 32;

// The bytes of a slab that holds whole heads.
int64_t head_slab(const pygdist_csr& csr) {
  const int64_t head_bytes = std::max<int64_t>(csr.num_features / csr.num_heads * csr.value_bits / 8, 1);
  return head_bytes * std::max<int64_t>(kSlabBytes / head_bytes, 1);
}

using Buffer = std::unique_ptr<char, decltype(&std::free)>;

// Aligned, so that a row of a slab is two cache lines and not parts of three.
Buffer allocate(int64_t bytes) {
  const int64_t whole = (bytes + kSlabBytes - 1) / kSlabBytes * kSlabBytes;
  Buffer buffer(static_cast<char*>(std::aligned_alloc(kSlabBytes, std::max(whole, kSlabBytes))), &std::free);
  expect_writes(buffer.get(), whole);
  return buffer;
}

// The edge values of all entries in the order of the entries: every slab reads them.
void order_values(const pygdist_csr& csr, char* ordered) {
  const int64_t size = csr.num_heads * (csr.value_bits == 64 ? 8 : 4);
  const int64_t entries = csr.indptr[csr.num_rows];
  const auto* values = static_cast<const char*>(csr.weight);
  const auto place = [&](int64_t e) {
    return csr.perm_bits == 32 ? static_cast<const int32_t*>(csr.perm)[e] : static_cast<const int64_t*>(csr.perm)[e];
  };
#pragma omp parallel for schedule(static) num_threads(static_cast<int>(std::max(csr.num_threads, 1)))
  for (int64_t e = 0; e < entries; ++e) {
    if (e + 32 < entries) __builtin_prefetch(values + place(e + 32) * size);
    std::memcpy(ordered + e * size, values + place(e) * size, size);
  }
}

// The bytes that a row takes in a slab: rows narrower than a cache line are padded so that none lies on two.
int64_t bytes_apart(int64_t width) {
  int64_t bytes = width;
  while (bytes < kLineBytes && (bytes & (bytes - 1))) bytes += bytes & -bytes;
  return bytes;
}

// True if sums of rows narrower than a cache line are faster after a copy that puts each on one line: 10 columns took
// 0.7 ns an entry with the copy, 0.9 without.
bool worth_apart(const pygdist_csr& csr) {
  const int64_t row_bytes = csr.num_features * csr.value_bits / 8;
  return csr.index_bits == 16 && bytes_apart(row_bytes) > row_bytes && csr.indptr[csr.num_rows] >= 8 * csr.num_cols;
}

// Runs `kernel` slab by slab over the columns of the matrices whose rows the entries name.
void run_slabs(RowsKernel kernel, Job& job, int64_t slab_bytes = kSlabBytes,
               std::initializer_list<const void* Job::*> gathered = {&Job::x}) {
  const int64_t size = job.csr.value_bits / 8;
  const int64_t row_bytes = job.csr.num_features * size;
  const bool permuted = job.csr.weight && job.csr.perm;
  const int64_t matrix_bytes = job.csr.num_cols * std::min(slab_bytes, bytes_apart(row_bytes));
  const Buffer slabs = allocate(matrix_bytes * static_cast<int64_t>(gathered.size()));
  const Buffer values = allocate(permuted ? job.csr.indptr[job.csr.num_rows] * job.csr.num_heads * 8 : 0);
  if (!slabs || !values) return run(kernel, job);
  if (permuted) {
    order_values(job.csr, values.get());
    job.csr.weight = values.get();
    job.csr.perm = nullptr;
    job.csr.perm_bits = 0;
  }
  const Job whole = job;
  for (int64_t first = 0; first < row_bytes; first += slab_bytes) {
    const int64_t width = std::min(slab_bytes, row_bytes - first), apart = bytes_apart(width);
    char* slab = slabs.get();
    for (const auto matrix : gathered) {
      const char* const from = static_cast<const char*>(whole.*matrix) + first;
#pragma omp parallel for schedule(static) num_threads(static_cast<int>(std::max(job.csr.num_threads, 1)))
      for (int64_t row = 0; row < job.csr.num_cols; ++row) {
        std::memcpy(slab + row * apart, from + row * row_bytes, width);
      }
      job.*matrix = slab - first;  // column `first` of the matrix is column 0 of the slab
      slab += matrix_bytes;
    }
    job.first_column = first / size;
    job.last_column = (first + width) / size;
    job.stride = apart / size;
    run(kernel, job);
  }
}

// Runs a kernel that adds to rows of the result as entries name them, each sum in one order whatever the number of
// threads: a thread has some cache lines of each row or, where these are fewer than threads, a part of the rows, too.
void run_columns(RowsKernel kernel, const Job& whole) {
  const int64_t columns = kLineBytes * 8 / whole.csr.value_bits, rows = whole.csr.num_cols;
  const int64_t lines = (whole.csr.num_features + columns - 1) / columns;
  const int64_t threads = std::max<int64_t>(whole.csr.num_threads, 1);
  const int64_t groups = std::min(threads, lines), parts = groups ? threads / groups : 0;
#pragma omp parallel for schedule(static) num_threads(static_cast<int>(threads))
  for (int64_t task = 0; task < groups * parts; ++task) {
    const int64_t group = task / parts, part = task % parts;
    Job job = whole;
    job.first_column = lines * group / groups * columns;
    job.last_column = std::min(lines * (group + 1) / groups * columns, whole.csr.num_features);
    kernel(job, rows * part / parts, rows * (part + 1) / parts);
  }
}

template <class T>
bool any_nan(const void* data, int64_t values, int32_t threads) {
  const T* const x = static_cast<const T*>(data);
  bool found = false;
#pragma omp parallel for simd schedule(static) num_threads(threads) reduction(| : found) if (values > kSmallestChunk)
  for (int64_t i = 0; i < values; ++i) found |= x[i] != x[i];
  return found;
}

// True if no value of `x` is NaN, and looking for one is little beside reading all entries.
bool clean(const pygdist_csr& csr, const void* x) {
  if (csr.op != PYGDIST_COPY || csr.indptr[csr.num_rows] < kOften * csr.num_cols) return false;
  const int64_t values = csr.num_cols * csr.num_features;
  const int32_t threads = std::max(csr.num_threads, 1);
  return !(csr.value_bits == 32 ? any_nan<float>(x, values, threads) : any_nan<double>(x, values, threads));
}

// True if at most one in kMany of all entries, counted for each feature, lie in rows whose place is PYGDIST_SEVERAL: then
// the entries that attain these extrema can be looked for one by one.
bool few_ties(const pygdist_csr& csr, const int32_t* places) {
  constexpr int64_t kMany = 64;
  int64_t tied = 0;
  const int64_t values = csr.num_rows * csr.num_features;
  const int32_t threads = std::max(csr.num_threads, 1);
#pragma omp parallel for schedule(static) num_threads(threads) reduction(+ : tied) if (values > kSmallestChunk)
  for (int64_t row = 0; row < csr.num_rows; ++row) {
    const int32_t* const own = places + row * csr.num_features;
    int32_t several = 0;
    for (int64_t f = 0; f < csr.num_features; ++f) several += own[f] == PYGDIST_SEVERAL;
    tied += several * (csr.indptr[row + 1] - csr.indptr[row]);
  }
  return tied * kMany <= csr.indptr[csr.num_rows] * csr.num_features;
}

bool known_types(const pygdist_csr& csr, bool half = false, bool short_index = false) {
  const bool values = csr.value_bits == 32 || csr.value_bits == 64 || (half && csr.value_bits == 16);
  const bool perm = !csr.perm || csr.perm_bits == 32 || csr.perm_bits == 64;
  const bool short_fits = short_index && csr.index_bits == 16 && csr.op == PYGDIST_COPY && csr.value_bits != 16;
  const bool index = csr.index_bits == 32 || csr.index_bits == 64 || short_fits;
  return index && values && perm && csr.op >= PYGDIST_COPY && csr.op <= PYGDIST_ADD;
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

int32_t pygdist_set_cache(int64_t bytes) {
  pygdist::chosen_cache = bytes;
  return PYGDIST_OK;
}

// A counting sort by column. One thread: it writes to as many places as there are columns, and runs once per graph.
int32_t pygdist_transpose(const pygdist_csr* csr, int64_t* indptr, int32_t* index, int32_t* perm) {
  if (csr->index_bits != 32) return PYGDIST_BAD_TYPE;
  const auto* column = static_cast<const int32_t*>(csr->index);
  const int64_t entries = csr->indptr[csr->num_rows];
  std::fill(indptr, indptr + csr->num_cols + 1, 0);
  for (int64_t e = 0; e < entries; ++e) ++indptr[column[e] + 1];
  for (int64_t col = 0; col < csr->num_cols; ++col) indptr[col + 1] += indptr[col];
  const std::unique_ptr<int64_t[]> next(new (std::nothrow) int64_t[csr->num_cols]);
  if (!next) return PYGDIST_NO_MEMORY;
  std::copy(indptr, indptr + csr->num_cols, next.get());
  for (int64_t row = 0; row < csr->num_rows; ++row) {
    for (int64_t e = csr->indptr[row]; e < csr->indptr[row + 1]; ++e) {
      const int64_t place = next[column[e]]++;
      index[place] = static_cast<int32_t>(row);
      perm[place] = static_cast<int32_t>(e);
    }
  }
  return PYGDIST_OK;
}

int32_t pygdist_spmm(const pygdist_csr* csr, int32_t reduce, const void* x, void* out) {
  if (reduce != PYGDIST_SUM && reduce != PYGDIST_MEAN && reduce != PYGDIST_ONTO) return PYGDIST_BAD_REDUCE;
  if (!pygdist::known_types(*csr, true, true)) return PYGDIST_BAD_TYPE;
  Job job{*csr};
  job.reduce = reduce;
  job.x = x;
  job.result = out;
  pygdist::expect_writes(out, csr->num_rows * csr->num_features * csr->value_bits / 8);
  const auto kernel = pygdist::kernels().spmm;
  const int64_t slab = pygdist::sum_slab(*csr);
  const int64_t small = slab == pygdist::kSlabBytes ? pygdist::small_for_whole_rows() : pygdist::kSmall;
  const bool wide = pygdist::worth_slabs(*csr, slab, 1, pygdist::kOften, small);
  const bool slabs = wide || pygdist::worth_apart(*csr);
  slabs ? pygdist::run_slabs(kernel, job, slab) : pygdist::run(kernel, job);
  return PYGDIST_OK;
}

int32_t pygdist_extremum(const pygdist_csr* csr, int32_t reduce, const void* x, void* out, int32_t* places) {
  if (reduce != PYGDIST_MAX && reduce != PYGDIST_MIN) return PYGDIST_BAD_REDUCE;
  if (!pygdist::known_types(*csr)) return PYGDIST_BAD_TYPE;
  Job job{*csr};
  job.reduce = reduce;
  job.x = x;
  job.result = out;
  job.row_result = places;
  job.clean = pygdist::clean(*csr, x);
  const int64_t values = csr->num_rows * csr->num_features;
  pygdist::expect_writes(out, values * csr->value_bits / 8);
  pygdist::expect_writes(places, values * 4);
  const auto kernel = pygdist::kernels().extremum;
  const int64_t slab = pygdist::sum_slab(*csr);
  const bool even = csr->num_features * csr->value_bits / 8 % pygdist::kSlabBytes == 0;
  const int64_t small = even ? pygdist::small_for_whole_rows() : pygdist::kSmall;
  pygdist::worth_slabs(*csr, slab, 1, pygdist::kOften, small)
      ? pygdist::run_slabs(kernel, job, slab)
      : pygdist::run(kernel, job);
  return PYGDIST_OK;
}

int32_t pygdist_few_ties(const pygdist_csr* csr, const int32_t* places, int32_t* few) {
  *few = pygdist::few_ties(*csr, places);
  return PYGDIST_OK;
}

int32_t pygdist_extremum_scatter(const pygdist_csr* csr, const void* x, const void* out, const int32_t* places,
                                 const void* grad_out, void* grad_x) {
  if (!pygdist::known_types(*csr)) return PYGDIST_BAD_TYPE;
  Job job{*csr};
  job.x = x;
  job.out = out;
  job.places = places;
  job.grad = grad_out;
  job.result = grad_x;
  pygdist::expect_writes(grad_x, csr->num_cols * csr->num_features * csr->value_bits / 8);
  pygdist::run_columns(pygdist::kernels().extremum_scatter, job);
  return PYGDIST_OK;
}

int32_t pygdist_share_ties(const pygdist_csr* csr, const void* x, const void* out, const void* grad_out, void* share) {
  if (!pygdist::known_types(*csr)) return PYGDIST_BAD_TYPE;
  Job job{*csr};
  job.x = x;
  job.out = out;
  job.grad = grad_out;
  job.result = share;
  const auto kernel = pygdist::kernels().share_ties;
  pygdist::worth_slabs(*csr) ? pygdist::run_slabs(kernel, job) : pygdist::run(kernel, job);
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
  const auto kernel = pygdist::kernels().extremum_grad;
  pygdist::worth_slabs(*transposed, pygdist::kSlabBytes, 2)
      ? pygdist::run_slabs(kernel, job, pygdist::kSlabBytes, {&Job::out, &Job::grad})
      : pygdist::run(kernel, job);
  return PYGDIST_OK;
}

int32_t pygdist_sddmm(const pygdist_csr* csr, const void* x, const void* grad, const void* out, void* grad_weight) {
  if (!pygdist::known_types(*csr, out == nullptr)) return PYGDIST_BAD_TYPE;
  Job job{*csr};
  job.x = x;
  job.out = out;
  job.grad = grad;
  job.result = grad_weight;
  pygdist::run(pygdist::kernels().sddmm, job);
  return PYGDIST_OK;
}

int32_t pygdist_edge_softmax(const pygdist_csr* csr, const void* source, const void* target, const void* edge,
                             double slope, void* alpha) {
  if (!pygdist::known_types(*csr)) return PYGDIST_BAD_TYPE;
  Job job{*csr};
  job.source = source;
  job.target = target;
  job.edge = edge;
  job.slope = slope;
  job.result = alpha;
  pygdist::run(pygdist::kernels().edge_softmax, job);
  return PYGDIST_OK;
}

int32_t pygdist_edge_softmax_grad(const pygdist_csr* csr, const void* source, const void* target, const void* edge,
                                  double slope, const void* alpha, const void* grad_alpha, void* grad_score,
                                  void* grad_target) {
  if (!pygdist::known_types(*csr)) return PYGDIST_BAD_TYPE;
  Job job{*csr};
  job.source = source;
  job.target = target;
  job.edge = edge;
  job.slope = slope;
  job.out = alpha;
  job.grad = grad_alpha;
  job.result = grad_score;
  job.row_result = grad_target;
  pygdist::run(pygdist::kernels().edge_softmax_grad, job);
  return PYGDIST_OK;
}

int32_t pygdist_sum_edges(const pygdist_csr* csr, void* out) {
  if (!pygdist::known_types(*csr)) return PYGDIST_BAD_TYPE;
  Job job{*csr};
  job.result = out;
  pygdist::run(pygdist::kernels().sum_edges, job);
  return PYGDIST_OK;
}

int32_t pygdist_gatv2_scores(const pygdist_csr* csr, const void* source, const void* target, const void* attention,
                             double slope, void* scores) {
  if (!pygdist::known_types(*csr)) return PYGDIST_BAD_TYPE;
  Job job{*csr};
  job.source = source;
  job.target = target;
  job.attention = attention;
  job.slope = slope;
  job.result = scores;
  pygdist::run(pygdist::kernels().gatv2_scores, job);
  return PYGDIST_OK;
}

int32_t pygdist_gatv2_grad(const pygdist_csr* csr, const void* source, const void* target, const void* attention,
                           double slope, void* grad_target, void* grad_attention) {
  if (!pygdist::known_types(*csr)) return PYGDIST_BAD_TYPE;
  Job job{*csr};
  job.source = source;
  job.target = target;
  job.attention = attention;
  job.slope = slope;
  job.result = grad_target;
  job.row_result = grad_attention;
  pygdist::run(pygdist::kernels().gatv2_grad, job);
  return PYGDIST_OK;
}

int32_t pygdist_gat(const pygdist_csr* csr, const void* x, const void* source_by_head, const void* target, double slope,
                    void* out, void* above, void* facts, int32_t onto) {
  if (!pygdist::known_types(*csr)) return PYGDIST_BAD_TYPE;
  Job job{*csr};
  job.x = x;
  job.source = source_by_head;
  job.target = target;
  job.slope = slope;
  job.result = out;
  job.above_result = above;
  job.row_result = facts;
  job.onto = onto != 0;
  if (!job.onto) {
    for (void* rows : {out, above}) {
      pygdist::expect_writes(rows, csr->num_rows * csr->num_features * csr->value_bits / 8);
    }
  }
  // whole heads: a slab with part of a head would compute its weights again, on top of the sums of the slab before
  const int64_t slab = pygdist::head_slab(*csr);
  const auto kernel = pygdist::kernels().gat;
  pygdist::worth_slabs(*csr, slab, 1, pygdist::kOftenGat) ? pygdist::run_slabs(kernel, job, slab) : pygdist::run(kernel, job);
  return PYGDIST_OK;
}

int32_t pygdist_gat_ends(const pygdist_csr* csr, const void* target, double slope, const void* out, const void* above,
                         const void* facts, const void* grad, void* ends, void* grad_target) {
  if (!pygdist::known_types(*csr)) return PYGDIST_BAD_TYPE;
  Job job{*csr};
  job.target = target;
  job.slope = slope;
  job.out = out;
  job.above = above;
  job.facts = facts;
  job.grad = grad;
  job.result = ends;
  job.row_result = grad_target;
  pygdist::run_rows(pygdist::kernels().gat_dots, job);
  return PYGDIST_OK;
}

int32_t pygdist_gat_grad(const pygdist_csr* transposed, const void* x, const void* source, double slope, const void* ends,
                         const void* grad, void* grad_x, void* grad_source) {
  if (!pygdist::known_types(*transposed)) return PYGDIST_BAD_TYPE;
  Job job{*transposed};
  job.x = grad;
  job.out = x;
  job.source = source;
  job.slope = slope;
  job.ends = ends;
  job.result = grad_x;
  job.row_result = grad_source;
  pygdist::expect_writes(grad_x, transposed->num_rows * transposed->num_features * transposed->value_bits / 8);
  const auto kernel = pygdist::kernels().gat_grad;
  const int64_t slab = pygdist::head_slab(*transposed);
  pygdist::worth_slabs(*transposed, slab, 1, pygdist::kOftenGat) ? pygdist::run_slabs(kernel, job, slab) : pygdist::run(kernel, job);
  return PYGDIST_OK;
}

}  // extern "C"
