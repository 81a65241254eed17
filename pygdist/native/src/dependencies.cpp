// Chooses the rows of other ranks that a rank computes again instead of fetching: NeutronStar's greedy Algorithm 4.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <new>
#include <numeric>
#include <utility>
#include <vector>

#include "pygdist_native.h"

namespace {

// Most edges of a walk if a share of rows is asked for, as no cost ends it then. On dense graphs nearly all of the
// graph is below most rows, and the cheapest of them is not worth walking so many edges of each.
constexpr int64_t kEdgesOfAllWalks = 200'000'000, kEdgesOfAWalk = 10'000;

// The rows below one dependency, level by level; replicas cost nothing, nor do the rows below them.
class Subtree {
 public:
  Subtree(const pygdist_dependencies& given, std::vector<std::vector<uint8_t>>& replicas)
      : given_(given), replicas_(replicas), seen_(given.num_rows, 0) {}

  // Seconds to compute the row of `root` after hop `level` again. Stops at `limit` and returns at least that; beyond
  // `most_edges` it stops too, and returns less than the true cost.
  double cost(int64_t root, int32_t level, double limit, int64_t most_edges) {
    double seconds = 0;
    int64_t edges = 0;
    walk(root, level, [&](int64_t row, int32_t at) {
      const int64_t degree = at > 0 ? given_.indptr[row + 1] - given_.indptr[row] : 0;
      seconds += given_.row_s[at] + static_cast<double>(degree) * given_.edge_s[at];
      edges += degree;
      return seconds < limit && edges < most_edges;
    });
    return seconds;
  }

  // Makes all these rows replicas if they fit `room` bytes, and subtracts theirs; returns true if it did.
  bool keep(int64_t root, int32_t level, double& room) {
    double bytes = 0;
    kept_.clear();
    walk(root, level, [&](int64_t row, int32_t at) {
      bytes += given_.row_bytes[at];
      if (at > 0) bytes += given_.bytes_per_edge * static_cast<double>(given_.indptr[row + 1] - given_.indptr[row]);
      kept_.push_back({row, at});
      return bytes <= room;
    });
    if (bytes > room) return false;
    for (const auto& [row, at] : kept_) replicas_[at][row] = 1;
    room -= bytes;
    return true;
  }

 private:
  // Calls `visit(row, level)` for each new row, from `level` down to 0, until it is false. A row after hop k needs its
  // own row and the sources of its edges after hop k - 1.
  template <typename Visit>
  void walk(int64_t root, int32_t level, Visit visit) {
    frontier_.assign(1, root);
    for (int32_t at = level; at >= 0; --at) {
      ++round_;
      next_.clear();
      for (const int64_t row : frontier_) {
        if (replicas_[at][row]) continue;
        if (!visit(row, at)) return;
        if (at == 0) continue;
        reach(row);
        for (int64_t edge = given_.indptr[row]; edge < given_.indptr[row + 1]; ++edge) reach(given_.index[edge]);
      }
      std::swap(frontier_, next_);
    }
  }

  void reach(int64_t row) {
    if (row < given_.num_owned || seen_[row] == round_) return;
    seen_[row] = round_;
    next_.push_back(row);
  }

  const pygdist_dependencies& given_;
  std::vector<std::vector<uint8_t>>& replicas_;
  std::vector<int64_t> seen_, frontier_, next_;
  std::vector<std::pair<int64_t, int32_t>> kept_;
  int64_t round_ = 0;
};

}  // namespace

extern "C" {

int32_t pygdist_choose_dependencies(const pygdist_dependencies* given, uint8_t* chosen) try {
  const int64_t halo = given->num_halo;
  std::vector<std::vector<uint8_t>> replicas(given->num_hops, std::vector<uint8_t>(given->num_rows, 0));
  Subtree subtree(*given, replicas);
  std::vector<double> cost(halo);
  std::vector<int64_t> order(halo);
  double room = given->max_bytes;
  bool full = false;  // the algorithm ends with the first that does not fit
  for (int32_t hop = 1; hop <= given->num_hops; ++hop) {
    const bool by_share = given->share >= 0;
    const int64_t most = by_share ? static_cast<int64_t>(given->share * static_cast<double>(halo) + 0.5) : halo;
    const double limit = by_share ? std::numeric_limits<double>::infinity() : given->fetch_s[hop];
    const int64_t most_edges = by_share && halo > 0 ? std::max(kEdgesOfAWalk, kEdgesOfAllWalks / halo)
                                                    : std::numeric_limits<int64_t>::max();
    uint8_t* mine = chosen + (hop - 1) * halo;
    std::fill(mine, mine + halo, 0);
    for (int64_t i = 0; i < halo; ++i) cost[i] = subtree.cost(given->num_owned + i, hop - 1, limit, most_edges);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return cost[a] < cost[b]; });
    int64_t taken = 0;
    for (int64_t i = 0; i < halo && taken < most && !full; ++i) {
      const int64_t row = given->num_owned + order[i];
      if (subtree.cost(row, hop - 1, limit, most_edges) >= limit) continue;
      full = !subtree.keep(row, hop - 1, room);
      if (full) break;
      mine[order[i]] = 1;
      ++taken;
    }
  }
  return PYGDIST_OK;
} catch (const std::bad_alloc&) {
  return PYGDIST_NO_MEMORY;
}

int32_t pygdist_follow_dependencies(const pygdist_dependencies* given, const uint8_t* chosen, uint8_t* needed,
                                    int64_t* edges) {
  const int64_t rows = given->num_rows, own = given->num_owned, halo = given->num_halo;
  std::fill(needed, needed + (given->num_hops + 1) * rows, 0);
  for (int32_t hop = given->num_hops; hop > 0; --hop) {
    const uint8_t* const later = needed + hop * rows;
    uint8_t* const now = needed + (hop - 1) * rows;
    const uint8_t* const mine = chosen + (hop - 1) * halo;
    for (int64_t i = 0; i < halo; ++i) now[own + i] = mine[i];
    for (int64_t row = own; row < rows; ++row) {
      if (!later[row]) continue;
      now[row] = 1;
      for (int64_t edge = given->indptr[row]; edge < given->indptr[row + 1]; ++edge) now[given->index[edge]] = 1;
    }
    std::fill(now, now + own, 0);
    int64_t all = 0, here = 0;
    for (int64_t row = 0; row < rows; ++row) {
      if (row >= own && !later[row]) continue;
      all += given->indptr[row + 1] - given->indptr[row];
      for (int64_t edge = given->indptr[row]; edge < given->indptr[row + 1]; ++edge) {
        here += given->index[edge] < own || now[given->index[edge]];
      }
    }
    edges[2 * (hop - 1)] = all;
    edges[2 * (hop - 1) + 1] = here;
  }
  return PYGDIST_OK;
}

}  // extern "C"
