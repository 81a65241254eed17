// Shared by the streaming partitioners: hashes, the parts that hold each node, and the load of each part.
#pragma once

#include <cstdint>

#include "pygdist_native.h"

namespace pygdist {

// The finaliser of splitmix64, the same as pygdist.partition.hash.mix.
inline uint64_t mixed(uint64_t value, uint64_t seed) {
  uint64_t state = seed + (value + 1) * 0x9E3779B97F4A7C15ull;
  state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9ull;
  state = (state ^ (state >> 27)) * 0x94D049BB133111EBull;
  return state ^ (state >> 31);
}

// A number of 0..count-1, uniformly, from 64 random bits.
inline int32_t drawn(uint64_t bits, int32_t count) {
  return static_cast<int32_t>((static_cast<unsigned __int128>(bits) * static_cast<uint64_t>(count)) >> 64);
}

// The parts that hold a replica of each node: a row of `words` 64-bit words for each node, one bit for each part.
class Replicas {
 public:
  Replicas(uint64_t* bits, int32_t num_parts) : bits_(bits), words_((num_parts + 63) / 64) {}

  int32_t words() const { return words_; }
  uint64_t* of(int64_t node) const { return bits_ + node * words_; }
  void prefetch(int64_t node) const { __builtin_prefetch(of(node), 1); }
  bool has(int64_t node, int32_t part) const { return of(node)[part >> 6] >> (part & 63) & 1; }
  // The same for several threads.
  bool has_now(int64_t node, int32_t part) const {
    return __atomic_load_n(of(node) + (part >> 6), __ATOMIC_RELAXED) >> (part & 63) & 1;
  }
  void add_at_once(int64_t node, int32_t part) const {
    __atomic_fetch_or(of(node) + (part >> 6), uint64_t{1} << (part & 63), __ATOMIC_RELAXED);
  }
  void add(int64_t node, int32_t part) const { of(node)[part >> 6] |= uint64_t{1} << (part & 63); }

 private:
  uint64_t* bits_;
  int32_t words_;
};

// The edges that each part has so far, and the most that it may have.
class Loads {
 public:
  Loads(int64_t* load, int32_t num_parts, int64_t capacity) : load_(load), num_parts_(num_parts), capacity_(capacity) {}

  int64_t of(int32_t part) const { return load_[part]; }
  bool full(int32_t part) const { return load_[part] >= capacity_; }
  void add(int32_t part) const { ++load_[part]; }

  // The least loaded of the parts whose bit is set and that have room, the first of equals; -1 if there is none.
  template <class Words>
  int32_t least(const Words& word, int32_t words) const {
    int32_t best = -1;
    for (int32_t w = 0; w < words; ++w) {
      for (uint64_t rest = word(w); rest; rest &= rest - 1) {
        const int32_t part = 64 * w + __builtin_ctzll(rest);
        if (!full(part) && (best < 0 || load_[part] < load_[best])) best = part;
      }
    }
    return best;
  }

  // The least loaded of all parts.
  int32_t least() const {
    int32_t best = 0;
    for (int32_t part = 1; part < num_parts_; ++part) {
      if (load_[part] < load_[best]) best = part;
    }
    return best;
  }

 private:
  int64_t* load_;
  int32_t num_parts_;
  int64_t capacity_;
};

constexpr int64_t kEdgesAhead = 16;  // edges by which a node's state is prefetched ahead of its use

}  // namespace pygdist
