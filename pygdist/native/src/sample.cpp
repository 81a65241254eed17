// Mini-batches of a graph: sampled neighbourhoods, hop by hop, and induced subgraphs.
//
// One thread per call: ranks and the loader's workers run in parallel, each with its own batches. Random numbers are
// hashes, not drawn from a state: a neighbour depends on the seed, the epoch, the batch's seed nodes, the hop and the
// node alone, in whatever process the batch is sampled.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <unordered_set>

#include "placement.h"

namespace {

using pygdist::mixed;

constexpr int64_t kAhead = 24;  // entries by which memory is prefetched ahead of its use

// A number of 0..count-1, uniformly, from 64 random bits.
int64_t below(uint64_t bits, int64_t count) {
  return static_cast<int64_t>((static_cast<unsigned __int128>(bits) * static_cast<uint64_t>(count)) >> 64);
}

// Maps a node to its position in the batch: a hash table of 8 bytes per slot, two to four slots for each node that may
// come. It grows with the batch, not with the graph, and needs no clearing. An array over all nodes of the graph was 10
// to 30% faster with 50,000 nodes, and no faster with a million.
class Places {
 public:
  explicit Places(int64_t most_nodes) {
    while ((int64_t{1} << bits_) < 2 * most_nodes) ++bits_;
    slots_.reset(static_cast<uint64_t*>(std::calloc(size_t{1} << bits_, sizeof(uint64_t))));
    if (!slots_) throw std::bad_alloc();
  }

  void prefetch(int64_t node) const { __builtin_prefetch(slots_.get() + start(node), 1); }

  // The position of `node`, -1 if it has none.
  int64_t find(int64_t node) const {
    const uint64_t slot = slots_[seek(node)];
    return slot ? static_cast<int64_t>(slot & kPlace) : -1;
  }

  // The position of `node`; it gets `place` if it had none.
  int64_t add(int64_t node, int64_t place) {
    uint64_t& slot = slots_[seek(node)];
    if (!slot) slot = tag(node) | static_cast<uint64_t>(place);
    return static_cast<int64_t>(slot & kPlace);
  }

 private:
  static constexpr uint64_t kPlace = (uint64_t{1} << 32) - 1;
  static uint64_t tag(int64_t node) { return static_cast<uint64_t>(node + 1) << 32; }

  uint64_t start(int64_t node) const { return static_cast<uint64_t>(node) * 0x9E3779B97F4A7C15ull >> (64 - bits_); }

  // The slot of `node`, or the empty one that it would get.
  uint64_t seek(int64_t node) const {
    const uint64_t last = (uint64_t{1} << bits_) - 1;
    uint64_t at = start(node);
    while (slots_[at] && slots_[at] >> 32 != static_cast<uint64_t>(node + 1)) at = (at + 1) & last;
    return at;
  }

  struct Free {
    void operator()(uint64_t* slots) const { std::free(slots); }
  };
  std::unique_ptr<uint64_t[], Free> slots_;
  int32_t bits_ = 4;
};

// Draws from the positions 0..population-1 without replacement (Floyd), with one random number for each.
class Draws {
 public:
  void pick(uint64_t stream, int64_t population, int64_t wanted, int64_t begin, int64_t* out) {
    const bool scan = wanted <= kScanned;
    if (!scan) seen_.clear();
    for (int64_t i = 0; i < wanted; ++i) {
      const int64_t last = population - wanted + i;
      const int64_t drawn = begin + below(mixed(static_cast<uint64_t>(i), stream), last + 1);
      const bool taken = scan ? std::find(out, out + i, drawn) != out + i : !seen_.insert(drawn).second;
      out[i] = taken ? begin + last : drawn;
      if (taken && !scan) seen_.insert(begin + last);
    }
  }

 private:
  static constexpr int64_t kScanned = 64;  // so few are compared one by one faster
  std::unordered_set<int64_t> seen_;
};

int64_t edges_of(const pygdist_hop& hop, int64_t degree) {
  if (hop.fan_out < 0) return degree;
  if (hop.replace) return degree ? hop.fan_out : 0;
  return std::min(degree, hop.fan_out);
}

uint64_t key_of(const pygdist_hop& hop) {
  uint64_t batch = mixed(hop.epoch, hop.seed);
  for (int64_t i = 0; i < hop.num_seeds; ++i) batch = mixed(static_cast<uint64_t>(hop.node[i]), batch);
  return mixed(static_cast<uint64_t>(hop.number), batch);
}

// Writes the position of every sampled entry into `edge` and that of its row into `target`. Nodes are rows of the matrix;
// random numbers depend on their ids.
void draw(const pygdist_csr& csr, const pygdist_hop& hop, uint64_t key, const int64_t* id) {
  Draws draws;
  int64_t* edge = hop.edge;
  for (int64_t i = hop.first; i < hop.num_nodes; ++i) {
    if (i + kAhead < hop.num_nodes) __builtin_prefetch(csr.indptr + hop.node[i + kAhead]);
    const int64_t begin = csr.indptr[hop.node[i]], degree = csr.indptr[hop.node[i] + 1] - begin;
    const int64_t count = edges_of(hop, degree);
    if (hop.fan_out < 0 || (count == degree && !hop.replace)) {
      for (int64_t k = 0; k < degree; ++k) edge[k] = begin + k;
    } else {
      const uint64_t stream = mixed(static_cast<uint64_t>(id[i]), key);
      if (!hop.replace) {
        draws.pick(stream, degree, count, begin, edge);
      } else {
        for (int64_t k = 0; k < count; ++k) edge[k] = begin + below(mixed(static_cast<uint64_t>(k), stream), degree);
      }
    }
    std::fill(hop.target + (edge - hop.edge), hop.target + (edge - hop.edge) + count, i);
    edge += count;
  }
}

// Writes the entries at the positions into `out`, which may be the array of positions.
template <typename Value>
void gather(const void* values, const int64_t* position, int64_t count, int64_t* out) {
  const auto* const from = static_cast<const Value*>(values);
  for (int64_t e = 0; e < count; ++e) {
    if (e + kAhead < count) __builtin_prefetch(from + position[e + kAhead]);
    out[e] = from[position[e]];
  }
}

void gather(const void* values, int32_t bits, const int64_t* position, int64_t count, int64_t* out) {
  bits == 32 ? gather<int32_t>(values, position, count, out) : gather<int64_t>(values, position, count, out);
}

// Gives the nodes their positions; false if one is given twice.
bool fill(Places& places, const pygdist_hop& hop) {
  for (int64_t i = 0; i < hop.num_nodes; ++i) {
    if (places.add(hop.node[i], i) != i) return false;
  }
  return true;
}

// Replaces the ids of sources by their positions among the nodes; those that are not there yet are appended.
void place(Places& places, pygdist_hop& hop) {
  for (int64_t e = 0; e < hop.num_edges; ++e) {
    if (e + kAhead < hop.num_edges) places.prefetch(hop.source[e + kAhead]);
    const int64_t node = hop.source[e], position = places.add(node, hop.num_nodes);
    if (position == hop.num_nodes) hop.node[hop.num_nodes++] = node;
    hop.source[e] = position;
  }
}

bool known_types(const pygdist_csr& csr) {
  return (csr.index_bits == 32 || csr.index_bits == 64) && (!csr.perm || csr.perm_bits == 32 || csr.perm_bits == 64);
}

}  // namespace

extern "C" {

int32_t pygdist_count_hop(const pygdist_csr* csr, pygdist_hop* hop) {
  hop->num_edges = 0;
  for (int64_t i = hop->first; i < hop->num_nodes; ++i) {
    if (i + kAhead < hop->num_nodes) __builtin_prefetch(csr->indptr + hop->node[i + kAhead]);
    hop->num_edges += edges_of(*hop, csr->indptr[hop->node[i] + 1] - csr->indptr[hop->node[i]]);
  }
  return PYGDIST_OK;
}

int32_t pygdist_sample_hop(const pygdist_csr* csr, pygdist_hop* hop) try {
  if (!known_types(*csr)) return PYGDIST_BAD_TYPE;
  Places places(hop->num_nodes + std::min(hop->num_edges, csr->num_rows));
  if (!fill(places, *hop)) return PYGDIST_BAD_ID;
  draw(*csr, *hop, key_of(*hop), hop->node);
  gather(csr->index, csr->index_bits, hop->edge, hop->num_edges, hop->source);
  place(places, *hop);
  if (csr->perm) gather(csr->perm, csr->perm_bits, hop->edge, hop->num_edges, hop->edge);
  return PYGDIST_OK;
} catch (const std::bad_alloc&) {
  return PYGDIST_NO_MEMORY;
}

int32_t pygdist_hop_key(const pygdist_hop* hop, uint64_t* key) {
  *key = key_of(*hop);
  return PYGDIST_OK;
}

int32_t pygdist_draw(const pygdist_csr* csr, pygdist_hop* hop, uint64_t key, const int64_t* id) {
  if (!known_types(*csr)) return PYGDIST_BAD_TYPE;
  draw(*csr, *hop, key, id);
  gather(csr->index, csr->index_bits, hop->edge, hop->num_edges, hop->source);
  if (csr->perm) gather(csr->perm, csr->perm_bits, hop->edge, hop->num_edges, hop->edge);
  return PYGDIST_OK;
}

int32_t pygdist_place_hop(pygdist_hop* hop) try {
  Places places(hop->num_nodes + hop->num_edges);
  if (!fill(places, *hop)) return PYGDIST_BAD_ID;
  place(places, *hop);
  return PYGDIST_OK;
} catch (const std::bad_alloc&) {
  return PYGDIST_NO_MEMORY;
}

int32_t pygdist_induce(const pygdist_csr* csr, pygdist_hop* hop) try {
  if (!known_types(*csr)) return PYGDIST_BAD_TYPE;
  Places places(hop->num_nodes);
  if (!fill(places, *hop)) return PYGDIST_BAD_ID;
  draw(*csr, *hop, 0, hop->node);  // all in-edges of the nodes: fan_out is -1
  gather(csr->index, csr->index_bits, hop->edge, hop->num_edges, hop->source);
  int64_t kept = 0;
  for (int64_t e = 0; e < hop->num_edges; ++e) {
    if (e + kAhead < hop->num_edges) places.prefetch(hop->source[e + kAhead]);
    const int64_t place = places.find(hop->source[e]);
    if (place < 0) continue;
    hop->source[kept] = place;
    hop->target[kept] = hop->target[e];
    hop->edge[kept++] = hop->edge[e];
  }
  hop->num_edges = kept;
  if (csr->perm) gather(csr->perm, csr->perm_bits, hop->edge, kept, hop->edge);
  return PYGDIST_OK;
} catch (const std::bad_alloc&) {
  return PYGDIST_NO_MEMORY;
}

}  // extern "C"
