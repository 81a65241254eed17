// Streaming clustering (Hollocou et al., 2017) as SPRING and 2PS-L use it, and SPRING's merging of clusters (CATGNN,
// Algorithm 1).
#include <algorithm>
#include <cstdint>
#include <functional>
#include <new>
#include <numeric>
#include <queue>
#include <utility>
#include <vector>

#include "placement.h"

using pygdist::kEdgesAhead;

extern "C" {

// SPRING's lines 3 to 22; with `strict` 2PS-L's variant. Clusters are numbered from 0; -1: the node has not been seen.
// `volume` has room for one cluster per node.
int32_t pygdist_cluster(const pygdist_edges* edges, const int32_t* degree, int64_t max_volume, int32_t strict,
                        int32_t* cluster, int64_t* volume, int32_t* num_clusters, int32_t* richest) {
  for (int64_t e = 0; e < edges->count; ++e) {
    if (e + kEdgesAhead < edges->count) {
      for (const int64_t* ends : {edges->source, edges->target}) {
        const int64_t node = ends[e + kEdgesAhead];
        __builtin_prefetch(cluster + node, 1);
        __builtin_prefetch(degree + node);
        if (richest) __builtin_prefetch(richest + node, 1);
      }
      const int64_t near = e + kEdgesAhead / 2;  // its clusters are mostly final by now
      for (const int64_t* ends : {edges->source, edges->target}) {
        if (cluster[ends[near]] >= 0) __builtin_prefetch(volume + cluster[ends[near]], 1);
        if (richest && richest[ends[near]] >= 0) __builtin_prefetch(degree + richest[ends[near]]);
      }
    }
    const int64_t u = edges->source[e], v = edges->target[e];
    for (const int64_t node : {u, v}) {
      if (cluster[node] >= 0) continue;
      cluster[node] = (*num_clusters)++;
      volume[cluster[node]] = degree[node];
    }
    const int32_t a = cluster[u], b = cluster[v];
    if (a != b && volume[a] <= max_volume && volume[b] <= max_volume) {
      const bool to_b = volume[a] - (strict ? degree[u] : 0) <= volume[b] - (strict ? degree[v] : 0);
      const int64_t moved = to_b ? u : v;
      const int32_t leaves = to_b ? a : b, joins = to_b ? b : a;
      if (!strict || volume[joins] + degree[moved] <= max_volume) {
        volume[leaves] -= degree[moved];
        volume[joins] += degree[moved];
        cluster[moved] = joins;
      }
    }
    if (richest && u != v) {
      if (richest[u] < 0 || degree[richest[u]] < degree[v]) richest[u] = static_cast<int32_t>(v);
      if (richest[v] < 0 || degree[richest[v]] < degree[u]) richest[v] = static_cast<int32_t>(u);
    }
  }
  return PYGDIST_OK;
}

// Lines 23 to 30: merges clusters into those of their representatives' richest neighbours, the smallest first, as long as
// no more than `max_size` nodes come together. Replaces `cluster` by the merged ones, numbered from 0 in no particular
// order, and `num_clusters` by their number; `found` is the number of non-empty clusters before.
int32_t pygdist_merge_clusters(int64_t num_nodes, const int32_t* degree, const int32_t* richest, int64_t max_size,
                               int32_t* cluster, int32_t* num_clusters, int32_t* found) try {
  const int32_t count = *num_clusters;
  std::vector<int32_t> size(count, 0), top(count, -1), parent(count);  // top: the richest neighbour of any member
  std::iota(parent.begin(), parent.end(), 0);
  const auto richer = [&](int32_t a, int32_t b) { return b >= 0 && (a < 0 || degree[a] < degree[b]); };
  for (int64_t node = 0; node < num_nodes; ++node) {
    const int32_t own = cluster[node];
    if (own < 0) continue;
    ++size[own];
    if (richer(top[own], richest[node])) top[own] = richest[node];
  }
  const auto root = [&](int32_t one) {
    while (parent[one] != one) one = parent[one] = parent[parent[one]];
    return one;
  };
  using Rank = std::pair<int32_t, int32_t>;  // size, cluster
  std::vector<Rank> ranks;
  for (int32_t one = 0; one < count; ++one) {
    if (size[one]) ranks.emplace_back(size[one], one);
  }
  *found = static_cast<int32_t>(ranks.size());
  std::priority_queue<Rank, std::vector<Rank>, std::greater<Rank>> queue(std::greater<Rank>(), std::move(ranks));
  while (!queue.empty()) {
    const auto [ranked, one] = queue.top();
    queue.pop();
    if (parent[one] != one || size[one] != ranked || top[one] < 0) continue;  // merged, or its size has changed since
    const int32_t target = root(cluster[top[one]]);
    if (target == one || int64_t{size[one]} + size[target] > max_size) continue;
    parent[one] = target;
    size[target] += size[one];
    if (richer(top[target], top[one])) top[target] = top[one];
    queue.emplace(size[target], target);
  }
  std::vector<int32_t> number(count, -1);
  int32_t merged = 0;
  for (int64_t node = 0; node < num_nodes; ++node) {
    if (cluster[node] < 0) continue;
    int32_t& given = number[root(cluster[node])];
    if (given < 0) given = merged++;
    cluster[node] = given;
  }
  *num_clusters = merged;
  return PYGDIST_OK;
} catch (const std::bad_alloc&) {
  return PYGDIST_NO_MEMORY;
}

// The last step of both: assigns clusters to parts, the largest first, each to the part with the least so far. For an
// empty cluster part[c] is 0.
int32_t pygdist_deal(const int64_t* size, int64_t count, int32_t num_parts, int32_t* part) try {
  std::vector<int32_t> used;
  for (int64_t c = 0; c < count; ++c) {
    part[c] = 0;
    if (size[c]) used.push_back(static_cast<int32_t>(c));
  }
  std::stable_sort(used.begin(), used.end(), [&](int32_t a, int32_t b) { return size[a] > size[b]; });
  using Load = std::pair<int64_t, int32_t>;  // total, part
  std::priority_queue<Load, std::vector<Load>, std::greater<Load>> least;
  for (int32_t p = 0; p < num_parts; ++p) least.emplace(0, p);
  for (const int32_t c : used) {
    const auto [total, p] = least.top();
    least.pop();
    part[c] = p;
    least.emplace(total + size[c], p);
  }
  return PYGDIST_OK;
} catch (const std::bad_alloc&) {
  return PYGDIST_NO_MEMORY;
}

}  // extern "C"
