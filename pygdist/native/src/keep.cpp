// Dropout by hash: which values of a row are kept depends on the row's node, not on the rank that has the row.
#include <cstdint>

#include "pygdist_native.h"

namespace {

// A step of splitmix64, which takes up one more key.
inline uint64_t with_key(uint64_t state, uint64_t key) {
  uint64_t bits = (state ^ key) + 0x9E3779B97F4A7C15ull;
  bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9ull;
  bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EBull;
  return bits ^ (bits >> 31);
}

}  // namespace

int32_t pygdist_keep_values(const int64_t* node, int64_t num_rows, int64_t columns, uint64_t seed, uint64_t call,
                            uint64_t threshold, int32_t num_threads, uint8_t* kept) {
  const uint64_t of_call = with_key(seed, call);
#pragma omp parallel for num_threads(num_threads) schedule(static)
  for (int64_t i = 0; i < num_rows; ++i) {
    const uint64_t of_row = with_key(of_call, static_cast<uint64_t>(node[i]));
    uint8_t* out = kept + i * columns;
    for (int64_t j = 0; j < columns; ++j) out[j] = (with_key(of_row, static_cast<uint64_t>(j)) >> 40) >= threshold;
  }
  return PYGDIST_OK;
}
