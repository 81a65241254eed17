// Streaming node partitioners: each node goes to the part with most of its neighbours, as long as there is room.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <new>
#include <vector>

#include "placement.h"

extern "C" {

// Nodes first..first+count-1 in order. The score of a part is the number of the node's neighbours there, weighed
// against how full the part is: LDG multiplies by the share that is free, Fennel subtracts alpha gamma |P|^(gamma - 1).
int32_t pygdist_place_nodes(int64_t first, int64_t count, const int64_t* indptr, const int32_t* neighbour,
                            int32_t num_parts, int64_t capacity, int32_t fennel, double alpha, double gamma,
                            int64_t* load, int32_t* part) try {
  std::vector<double> weight(num_parts);
  std::vector<int64_t> near(num_parts, 0);
  const auto weigh = [&](int32_t p) {
    weight[p] = fennel ? alpha * gamma * std::pow(static_cast<double>(load[p]), gamma - 1)
                       : 1.0 - static_cast<double>(load[p]) / static_cast<double>(capacity);
  };
  for (int32_t p = 0; p < num_parts; ++p) weigh(p);
  for (int64_t row = 0; row < count; ++row) {
    for (int64_t at = indptr[row]; at < indptr[row + 1]; ++at) {
      if (at + pygdist::kEdgesAhead < indptr[count]) __builtin_prefetch(part + neighbour[at + pygdist::kEdgesAhead]);
      const int32_t p = part[neighbour[at]];
      if (p >= 0 && neighbour[at] != first + row) ++near[p];
    }
    int32_t best = -1;
    double best_score = 0;
    for (int32_t p = 0; p < num_parts; ++p) {
      if (load[p] >= capacity) continue;
      const double found = static_cast<double>(near[p]);
      const double score = fennel ? found - weight[p] : found * weight[p];
      if (best < 0 || score > best_score || (score == best_score && load[p] < load[best])) {
        best = p;
        best_score = score;
      }
    }
    if (best < 0) best = static_cast<int32_t>(std::min_element(load, load + num_parts) - load);
    part[first + row] = best;
    ++load[best];
    weigh(best);
    for (int64_t at = indptr[row]; at < indptr[row + 1]; ++at) {
      const int32_t p = part[neighbour[at]];
      if (p >= 0) near[p] = 0;
    }
  }
  return PYGDIST_OK;
} catch (const std::bad_alloc&) {
  return PYGDIST_NO_MEMORY;
}

int32_t pygdist_fill_neighbours(const pygdist_edges* edges, int64_t first, int64_t last, int64_t* next,
                                int32_t* neighbour) {
  for (int64_t e = 0; e < edges->count; ++e) {
    const int64_t u = edges->source[e], v = edges->target[e];
    if (u >= first && u < last) neighbour[next[u - first]++] = static_cast<int32_t>(v);
    if (v >= first && v < last) neighbour[next[v - first]++] = static_cast<int32_t>(u);
  }
  return PYGDIST_OK;
}

}  // extern "C"
