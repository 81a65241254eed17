// Streaming edge partitioners (vertex-cut) assign each edge of a chunk to a part. State is in the caller's arrays, so
// results do not depend on how the stream is divided into chunks; edges are taken in order, one by one, unless no edge
// depends on another.
#include <algorithm>
#include <cstdint>

#include "placement.h"

namespace pygdist {
namespace {

// Calls `body(e)` for the edges of a chunk on all threads: for methods that use one edge alone.
template <class Body>
void for_all(const pygdist_edges& edges, const Body& body) {
#pragma omp parallel for schedule(static) num_threads(static_cast<int>(std::max(edges.num_threads, 1)))
  for (int64_t e = 0; e < edges.count; ++e) body(e);
}

// Calls `choose(u, v)` for the edges of a chunk in order, and records the part that it returns.
template <class Prefetch, class Choose>
void one_by_one(const pygdist_edges& edges, const pygdist_placement& state, int32_t* part, const Prefetch& prefetch,
                const Choose& choose) {
  const Replicas replicas(state.replicas, state.num_parts);
  const Loads loads(state.load, state.num_parts, state.capacity);
  for (int64_t e = 0; e < edges.count; ++e) {
    if (e + kEdgesAhead < edges.count) {
      for (const int64_t* ends : {edges.source, edges.target}) {
        replicas.prefetch(ends[e + kEdgesAhead]);
        prefetch(ends[e + kEdgesAhead]);
      }
    }
    const int64_t u = edges.source[e], v = edges.target[e];
    const int32_t chosen = choose(u, v, replicas, loads);
    replicas.add(u, chosen);
    replicas.add(v, chosen);
    loads.add(chosen);
    part[e] = chosen;
  }
}

// The hash of an edge; equal for its reverse.
inline uint64_t hash_of(uint64_t u, uint64_t v, uint64_t seed) { return mixed(std::max(u, v), mixed(std::min(u, v), seed)); }

// Parts that hold u and v, or either of them, as a function of the word.
struct Both {
  const uint64_t *u, *v;
  uint64_t operator()(int32_t word) const { return u[word] & v[word]; }
};
struct Either {
  const uint64_t *u, *v;
  uint64_t operator()(int32_t word) const { return u[word] | v[word]; }
};

bool any(const uint64_t* words, int32_t count) {
  uint64_t found = 0;
  for (int32_t word = 0; word < count; ++word) found |= words[word];
  return found != 0;
}

void no_prefetch(int64_t) {}

}  // namespace
}  // namespace pygdist

using pygdist::Both;
using pygdist::Either;
using pygdist::kEdgesAhead;
using pygdist::Loads;
using pygdist::Replicas;

extern "C" {

int32_t pygdist_count_degrees(const pygdist_edges* edges, int32_t* degree) {
  for (int64_t e = 0; e < edges->count; ++e) {
    if (e + kEdgesAhead < edges->count) {
      __builtin_prefetch(degree + edges->source[e + kEdgesAhead], 1);
      __builtin_prefetch(degree + edges->target[e + kEdgesAhead], 1);
    }
    ++degree[edges->source[e]];
    ++degree[edges->target[e]];
  }
  return PYGDIST_OK;
}

int32_t pygdist_place_random(const pygdist_edges* edges, int32_t num_parts, uint64_t seed, int32_t* part) {
  pygdist::for_all(*edges, [&](int64_t e) {
    part[e] = pygdist::drawn(pygdist::hash_of(edges->source[e], edges->target[e], seed), num_parts);
  });
  return PYGDIST_OK;
}

int32_t pygdist_place_grid(const pygdist_edges* edges, int32_t rows, int32_t columns, uint64_t seed, int32_t* part) {
  pygdist::for_all(*edges, [&](int64_t e) {
    const uint64_t u = edges->source[e], v = edges->target[e], bits = pygdist::hash_of(u, v, ~seed);
    const int32_t a = pygdist::drawn(pygdist::mixed(std::min(u, v), seed), rows * columns);
    const int32_t b = pygdist::drawn(pygdist::mixed(std::max(u, v), seed), rows * columns);
    const int32_t row = a / columns, column = a % columns, other_row = b / columns, other_column = b % columns;
    const auto cell = [&](int32_t r, int32_t c) { return r * columns + c; };
    // the parts that the rows and columns of both ends share; the hash of the edge draws one of them
    if (row != other_row && column != other_column) {
      part[e] = bits & 1 ? cell(row, other_column) : cell(other_row, column);
    } else if (column != other_column) {
      part[e] = cell(row, pygdist::drawn(bits, columns));
    } else if (row != other_row) {
      part[e] = cell(pygdist::drawn(bits, rows), column);
    } else {
      const int32_t one = pygdist::drawn(bits, rows + columns - 1);
      part[e] = one < columns ? cell(row, one) : cell(one - columns + (one - columns >= row), column);
    }
  });
  return PYGDIST_OK;
}

int32_t pygdist_place_dbh(const pygdist_edges* edges, const int32_t* degree, int32_t num_parts, uint64_t seed,
                          int32_t* part) {
  pygdist::for_all(*edges, [&](int64_t e) {
    if (e + kEdgesAhead < edges->count) {
      __builtin_prefetch(degree + edges->source[e + kEdgesAhead]);
      __builtin_prefetch(degree + edges->target[e + kEdgesAhead]);
    }
    const int64_t u = edges->source[e], v = edges->target[e];
    const bool cut_v = degree[u] < degree[v] || (degree[u] == degree[v] && u < v);
    part[e] = pygdist::drawn(pygdist::mixed(cut_v ? u : v, seed), num_parts);
  });
  return PYGDIST_OK;
}

int32_t pygdist_place_libra(const pygdist_edges* edges, const pygdist_placement* state, const int32_t* degree,
                            int32_t* part) {
  pygdist::one_by_one(
      *edges, *state, part,
      [&](int64_t node) {
        if (degree != nullptr) __builtin_prefetch(degree + node);
      },
      [&](int64_t u, int64_t v, const Replicas& replicas, const Loads& loads) {
        const int32_t words = replicas.words();
        const uint64_t *of_u = replicas.of(u), *of_v = replicas.of(v);
        int32_t best = loads.least(Both{of_u, of_v}, words);
        if (best < 0 && degree != nullptr && pygdist::any(of_u, words) && pygdist::any(of_v, words)) {
          const uint64_t* fewer = degree[u] < degree[v] ? of_u : of_v;
          best = loads.least(Both{fewer, fewer}, words);
        }
        if (best < 0) best = loads.least(Either{of_u, of_v}, words);
        return best < 0 ? loads.least() : best;
      });
  return PYGDIST_OK;
}

// `left` holds the number of edges of each node that are still to come; it starts as the degrees.
int32_t pygdist_place_powergraph(const pygdist_edges* edges, const pygdist_placement* state, int32_t* left,
                                 int32_t* part) {
  pygdist::one_by_one(
      *edges, *state, part, [&](int64_t node) { __builtin_prefetch(left + node, 1); },
      [&](int64_t u, int64_t v, const Replicas& replicas, const Loads& loads) {
        const int32_t words = replicas.words();
        const uint64_t *of_u = replicas.of(u), *of_v = replicas.of(v);
        int32_t best = loads.least(Both{of_u, of_v}, words);
        if (best < 0 && pygdist::any(of_u, words) && pygdist::any(of_v, words)) {
          const uint64_t* more = left[u] >= left[v] ? of_u : of_v;
          best = loads.least(Both{more, more}, words);
        }
        if (best < 0) best = loads.least(Either{of_u, of_v}, words);
        --left[u];
        --left[v];
        return best < 0 ? loads.least() : best;
      });
  return PYGDIST_OK;
}

// `seen` counts the edges of each node so far: HDRF's partial degrees.
int32_t pygdist_place_hdrf(const pygdist_edges* edges, const pygdist_placement* state, double lambda, int32_t* seen,
                           int32_t* part) {
  const int32_t num_parts = state->num_parts;
  int64_t largest = *std::max_element(state->load, state->load + num_parts);
  int64_t smallest = *std::min_element(state->load, state->load + num_parts);
  pygdist::one_by_one(
      *edges, *state, part, [&](int64_t node) { __builtin_prefetch(seen + node, 1); },
      [&](int64_t u, int64_t v, const Replicas& replicas, const Loads& loads) {
        ++seen[u];
        if (u != v) ++seen[v];
        const double share = static_cast<double>(seen[u]) / (static_cast<double>(seen[u]) + seen[v]);
        const double scale = lambda / (1.0 + static_cast<double>(largest - smallest));
        int32_t best = -1;
        double best_score = 0;
        for (int32_t p = 0; p < num_parts; ++p) {
          if (loads.full(p)) continue;
          // theta of u is `share`, of v the rest; a replica of the node of lower degree is worth more
          const double score = (replicas.has(u, p) ? 2.0 - share : 0.0) + (replicas.has(v, p) ? 1.0 + share : 0.0) +
                               scale * static_cast<double>(largest - loads.of(p));
          if (best < 0 || score > best_score) {
            best = p;
            best_score = score;
          }
        }
        if (best < 0) best = loads.least();
        const int64_t load = loads.of(best);  // before this edge
        largest = std::max(largest, load + 1);
        if (load == smallest) {
          smallest = load + 1;
          for (int32_t p = 0; p < num_parts; ++p) {
            if (p != best) smallest = std::min(smallest, loads.of(p));
          }
        }
        return best;
      });
  return PYGDIST_OK;
}

// Both passes of 2PS-L's second phase. The first places the edges between nodes whose clusters lie on one part and marks
// the others -1; the second looks at those, and at the two parts of their clusters alone.
int32_t pygdist_place_2psl(const pygdist_edges* edges, const pygdist_placement* state, const int32_t* degree,
                           const int32_t* cluster, const int64_t* volume, const int32_t* part_of_cluster, uint64_t seed,
                           int32_t second, int32_t* part) {
  const Replicas replicas(state->replicas, state->num_parts);
  const Loads loads(state->load, state->num_parts, state->capacity);
  for (int64_t e = 0; e < edges->count; ++e) {
    if (e + kEdgesAhead < edges->count) {
      for (const int64_t* ends : {edges->source, edges->target}) {
        __builtin_prefetch(cluster + ends[e + kEdgesAhead]);
        replicas.prefetch(ends[e + kEdgesAhead]);
        if (second) __builtin_prefetch(degree + ends[e + kEdgesAhead]);
      }
    }
    if (second && part[e] >= 0) continue;
    const int64_t u = edges->source[e], v = edges->target[e];
    const int32_t of_u = part_of_cluster[cluster[u]], of_v = part_of_cluster[cluster[v]];
    int32_t best = -1;
    if (!second) {
      if (of_u == of_v && !loads.full(of_u)) best = of_u;
    } else {
      const double share = static_cast<double>(degree[u]) / (static_cast<double>(degree[u]) + degree[v]);
      const double in_u = static_cast<double>(volume[cluster[u]]), in_v = static_cast<double>(volume[cluster[v]]);
      double best_score = 0;
      for (const int32_t p : {of_u, of_v}) {
        if (loads.full(p)) continue;
        const double score = (replicas.has(u, p) ? 2.0 - share : 0.0) + (replicas.has(v, p) ? 1.0 + share : 0.0) +
                             (p == of_u ? in_u : 0.0) / (in_u + in_v) + (p == of_v ? in_v : 0.0) / (in_u + in_v);
        if (best < 0 || score > best_score) {
          best = p;
          best_score = score;
        }
      }
      if (best < 0) {
        best = pygdist::drawn(pygdist::mixed(degree[u] >= degree[v] ? u : v, seed), state->num_parts);
        if (loads.full(best)) best = loads.least();
      }
    }
    part[e] = best;
    if (best < 0) continue;
    replicas.add(u, best);
    replicas.add(v, best);
    loads.add(best);
  }
  return PYGDIST_OK;
}

int32_t pygdist_mark_replicas(const pygdist_edges* edges, const pygdist_placement* state, const int32_t* part) {
  const Replicas replicas(state->replicas, state->num_parts);
  pygdist::for_all(*edges, [&](int64_t e) {
    if (e + kEdgesAhead < edges->count) {
      replicas.prefetch(edges->source[e + kEdgesAhead]);
      replicas.prefetch(edges->target[e + kEdgesAhead]);
    }
    for (const int64_t node : {edges->source[e], edges->target[e]}) {
      if (!replicas.has_now(node, part[e])) replicas.add_at_once(node, part[e]);
    }
  });
  for (int64_t e = 0; e < edges->count; ++e) ++state->load[part[e]];
  return PYGDIST_OK;
}

}  // extern "C"

