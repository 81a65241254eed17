// The C ABI of libpygdist_native, the only interface between Python and C++.
//
// Plain C types only, no torch and no Python header, so one build serves every version of both. Arrays are dense and
// row-major. Calls share no state but the choices of pygdist_set_isa and pygdist_set_cache. The caller guarantees that
// indices are in range and arrays long enough; nothing is checked again here. Raise PYGDIST_ABI_VERSION whenever a
// signature or a struct changes.
#ifndef PYGDIST_NATIVE_H
#define PYGDIST_NATIVE_H

#include <stdint.h>

#define PYGDIST_ABI_VERSION 20
#define PYGDIST_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

// A sparse matrix in CSR form, the type and width of the dense rows that it multiplies, and the threads to use.
typedef struct pygdist_csr {
  int64_t num_rows;
  int64_t num_cols;
  int64_t num_features;   // columns of every dense matrix of the call: num_heads times the channels of one head
  int64_t num_heads;      // values of each entry; value h is for the h-th group of columns
  const int64_t* indptr;  // num_rows + 1 offsets, the first one 0
  const void* index;      // column of each entry
  const void* weight;     // edge values, num_heads for each entry; null where op is PYGDIST_COPY
  const void* perm;       // entry e has the edge values at perm[e]; null: at e
  int32_t index_bits;     // 32 or 64: signed integers in `index`. 16: unsigned, for plain sums of IEEE floats
  int32_t perm_bits;      // the same for `perm`; 0 if it is null
  int32_t value_bits;     // of the dense matrices. 32, 64: IEEE floats. 16: bfloat16, sums in float, edge values float
  int32_t op;             // operator between an edge value and a row
  int32_t num_threads;
} pygdist_csr;

// ONTO is a sum that is added to the result as it is.
typedef enum pygdist_reduce {
  PYGDIST_SUM = 0,
  PYGDIST_MEAN = 1,
  PYGDIST_MAX = 2,
  PYGDIST_MIN = 3,
  PYGDIST_ONTO = 4,
} pygdist_reduce;

// The message of an entry (i, j): x[j], weight_ij * x[j], or weight_ij + x[j].
typedef enum pygdist_op { PYGDIST_COPY = 0, PYGDIST_MUL = 1, PYGDIST_ADD = 2 } pygdist_op;

typedef enum pygdist_status {
  PYGDIST_OK = 0,
  PYGDIST_BAD_TYPE = 1,
  PYGDIST_BAD_REDUCE = 2,
  PYGDIST_NO_MEMORY = 3,
  PYGDIST_BAD_LINE = 4,
  PYGDIST_BAD_ID = 5
} pygdist_status;

// Instruction sets, in ascending order. PYGDIST_ISA_BEST stands for the best one that this machine has.
typedef enum pygdist_isa {
  PYGDIST_ISA_BEST = -1,
  PYGDIST_ISA_PORTABLE = 0,
  PYGDIST_ISA_AVX2 = 1,
  PYGDIST_ISA_AVX512 = 2
} pygdist_isa;

PYGDIST_API int32_t pygdist_abi_version(void);

// Chooses the code path of later calls, for tests and measurements; at most what the machine has. Returns the choice.
PYGDIST_API int32_t pygdist_set_isa(int32_t level);

// Takes the last-level cache to have so many bytes in later calls, for tests of code paths; 0 for what the machine has.
PYGDIST_API int32_t pygdist_set_cache(int64_t bytes);

// The transpose: num_cols + 1 offsets, and for each of its entries the row and the position in the matrix. For
// 32-bit indices; rows and entries must fit 32 bits too. Entries of a row keep their order.
PYGDIST_API int32_t pygdist_transpose(const pygdist_csr* csr, int64_t* indptr, int32_t* index, int32_t* perm);

// out[i] = sum or mean over entries (i, j) of their messages; rows without entries become 0.
PYGDIST_API int32_t pygdist_spmm(const pygdist_csr* csr, int32_t reduce, const void* x, void* out);

// The place of an extremum is a number from 0 on where exactly one entry attains it, and otherwise one of these.
typedef enum pygdist_place {
  PYGDIST_NOWHERE = -1,               // the row has no entry, or the extremum is a NaN
  PYGDIST_SEVERAL = -2,               // any number of entries may attain it
  PYGDIST_PAIRS = -2 - (1 << 30),     // + 2^15 p + q: the p-th and the q-th entry of the row attain it
  PYGDIST_PAIR_BASE = 1 << 15,
} pygdist_place;

// out[i] = maximum or minimum over entries (i, j) of their messages; rows without entries become 0. If `places` is not
// null, places[i] tells, feature by feature, of the entry that attains out[i], its column j, or its position in row i if
// op multiplies. Columns and entries of a row are fewer than 2^31 then. No bfloat16.
PYGDIST_API int32_t pygdist_extremum(const pygdist_csr* csr, int32_t reduce, const void* x, void* out, int32_t* places);

// few = 1 if at most one in 64 of all entries, counted for each feature, lie in rows whose place is PYGDIST_SEVERAL.
PYGDIST_API int32_t pygdist_few_ties(const pygdist_csr* csr, const int32_t* places, int32_t* few);

// grad_x[j] = sum of the gradients of the extrema that j attains, by their places. Gradients are shared as by
// pygdist_share_ties, and multiplied by weight_ij if op multiplies. Where the place is PYGDIST_SEVERAL,
// all entries of the row are looked at: see pygdist_few_ties.
PYGDIST_API int32_t pygdist_extremum_scatter(const pygdist_csr* csr, const void* x, const void* out,
                                             const int32_t* places, const void* grad_out, void* grad_x);

// For max and min: share[i] = grad_out[i] / number of entries that attain out[i], feature by feature. An `out` of
// exactly 0 counts once more, as in torch.scatter_reduce, whose initial zero takes part in the tie.
PYGDIST_API int32_t pygdist_share_ties(const pygdist_csr* csr, const void* x, const void* out, const void* grad_out,
                                       void* share);

// For max and min, over the transposed matrix: grad_x[j] = sum of share[i], times weight_ij if op multiplies, over the
// entries whose message is out[i].
PYGDIST_API int32_t pygdist_extremum_grad(const pygdist_csr* transposed, const void* x, const void* out,
                                          const void* share, void* grad_x);

// grad_weight[e, h] = <x[j], grad[i]> over the columns of head h, for each entry e = (i, j); the sum of grad[i] if op
// adds. With `out` not null, only over those features whose message is out[i] (max and min; needs `weight`).
PYGDIST_API int32_t pygdist_sddmm(const pygdist_csr* csr, const void* x, const void* grad, const void* out,
                                  void* grad_weight);

// alpha[e, h] = softmax over the entries of row i of leaky_relu(source[j, h] + target[i, h] + edge[e, h]). Each of the
// three may be null, which counts as zeros; a slope of 1 leaves the sum as it is. Features are not read.
PYGDIST_API int32_t pygdist_edge_softmax(const pygdist_csr* csr, const void* source, const void* target,
                                         const void* edge, double slope, void* alpha);

// The gradient of pygdist_edge_softmax: grad_score[e, h] for `edge`, and grad_target[i, h].
PYGDIST_API int32_t pygdist_edge_softmax_grad(const pygdist_csr* csr, const void* source, const void* target,
                                              const void* edge, double slope, const void* alpha, const void* grad_alpha,
                                              void* grad_score, void* grad_target);

// out[i, h] = sum of the edge values of row i.
PYGDIST_API int32_t pygdist_sum_edges(const pygdist_csr* csr, void* out);

// scores[e, h] = sum over the channels of head h of attention * leaky_relu(source[j] + target[i]).
PYGDIST_API int32_t pygdist_gatv2_scores(const pygdist_csr* csr, const void* source, const void* target,
                                         const void* attention, double slope, void* scores);

// The gradient of pygdist_gatv2_scores for its target, with the gradients of the scores as edge values. grad_attention,
// which may be null, gets one row per target; their sum is the gradient of `attention`. Over the transposed matrix, with
// source and target swapped, it is the gradient for the source.
PYGDIST_API int32_t pygdist_gatv2_grad(const pygdist_csr* csr, const void* source, const void* target,
                                       const void* attention, double slope, void* grad_target, void* grad_attention);

// GAT's aggregation in one walk over the entries: out[i] = sum of alpha[e, h] * x[j] with alpha[e, h] the softmax over the
// entries of row i of leaky_relu(source_by_head[h, j] + target[i, h]). For the gradient, unless null: above[i], the part
// of the sum whose scores are positive, and facts[i, h, 0..2]: the largest score, one over the sum of the exponentials of
// the differences to it, and the sum of those alpha whose scores are positive. With `onto` the three results hold those
// over other entries of the same rows, and are updated to those over all; rows without entries stay as they are.
PYGDIST_API int32_t pygdist_gat(const pygdist_csr* csr, const void* x, const void* source_by_head, const void* target,
                                double slope, void* out, void* above, void* facts, int32_t onto);

// The inputs by row of the gradient of pygdist_gat: ends[h, i, 0..3]; also grad_target[i, h]. No entry is read.
PYGDIST_API int32_t pygdist_gat_ends(const pygdist_csr* csr, const void* target, double slope, const void* out,
                                     const void* above, const void* facts, const void* grad, void* ends,
                                     void* grad_target);

// The gradient of pygdist_gat, over the transposed matrix: grad_x[j] and grad_source[j, h]. Here `source` is [j, h].
PYGDIST_API int32_t pygdist_gat_grad(const pygdist_csr* transposed, const void* x, const void* source, double slope,
                                     const void* ends, const void* grad, void* grad_x, void* grad_source);

// Streaming partitioners. A call takes one chunk of the stream and updates the caller's arrays; results do not depend
// on how the stream is divided. Nodes are 0..num_nodes-1, below 2^31; `degree` counts the edge ends at each node.

typedef struct pygdist_edges {
  const int64_t* source;
  const int64_t* target;
  int64_t count;
  int32_t num_threads;  // for calls in which no edge depends on another
} pygdist_edges;

// A vertex-cut so far.
typedef struct pygdist_placement {
  uint64_t* replicas;  // for each node (num_parts + 63) / 64 words; bit p: part p holds the node
  int64_t* load;       // edges of each part
  int32_t num_parts;
  int64_t capacity;  // most edges of a part; if all parts were full, the least loaded takes more
} pygdist_placement;

PYGDIST_API int32_t pygdist_count_degrees(const pygdist_edges* edges, int32_t* degree);

// part[e] by a hash of both ends; in a grid of parts, by the cells that the rows and columns of both ends' hashes
// share; by a hash of the end of lower degree, of equals the lower id. An edge and its reverse get the same part.
PYGDIST_API int32_t pygdist_place_random(const pygdist_edges* edges, int32_t num_parts, uint64_t seed, int32_t* part);
PYGDIST_API int32_t pygdist_place_grid(const pygdist_edges* edges, int32_t rows, int32_t columns, uint64_t seed,
                                       int32_t* part);
PYGDIST_API int32_t pygdist_place_dbh(const pygdist_edges* edges, const int32_t* degree, int32_t num_parts,
                                      uint64_t seed, int32_t* part);

// Records the parts that these three chose.
PYGDIST_API int32_t pygdist_mark_replicas(const pygdist_edges* edges, const pygdist_placement* state,
                                          const int32_t* part);

// part[e] by the state of the two ends; updates `state`. The parts' docstrings in pygdist/partition have the rules.
// degree: edges of each node, or null.
PYGDIST_API int32_t pygdist_place_libra(const pygdist_edges* edges, const pygdist_placement* state,
                                        const int32_t* degree, int32_t* part);
// left[v]: edges of v still to come; at first the degrees.
PYGDIST_API int32_t pygdist_place_powergraph(const pygdist_edges* edges, const pygdist_placement* state, int32_t* left,
                                             int32_t* part);
// seen[v]: edges of v that have come; at first 0.
PYGDIST_API int32_t pygdist_place_hdrf(const pygdist_edges* edges, const pygdist_placement* state, double lambda,
                                       int32_t* seen, int32_t* part);
// In the first pass part[e] is -1 for edges that are left to the second, which skips all others.
PYGDIST_API int32_t pygdist_place_2psl(const pygdist_edges* edges, const pygdist_placement* state,
                                       const int32_t* degree, const int32_t* cluster, const int64_t* volume,
                                       const int32_t* part_of_cluster, uint64_t seed, int32_t second, int32_t* part);

// Streaming clustering: cluster[v], -1 at first; volume, of one entry per node; the number of clusters so far; and,
// unless null, the neighbour of highest degree of each node, -1 at first. `strict`: clusters are compared without the
// two nodes themselves, and none grows beyond `max_volume`.
PYGDIST_API int32_t pygdist_cluster(const pygdist_edges* edges, const int32_t* degree, int64_t max_volume,
                                    int32_t strict, int32_t* cluster, int64_t* volume, int32_t* num_clusters,
                                    int32_t* richest);

// SPRING's merging of clusters of up to `max_size` nodes. `cluster` and `num_clusters` are replaced by the merged ones;
// `found` becomes the number of clusters with nodes before.
PYGDIST_API int32_t pygdist_merge_clusters(int64_t num_nodes, const int32_t* degree, const int32_t* richest,
                                           int64_t max_size, int32_t* cluster, int32_t* num_clusters, int32_t* found);

// Assigns clusters to parts by size: part[c] for each of `count` clusters.
PYGDIST_API int32_t pygdist_deal(const int64_t* size, int64_t count, int32_t num_parts, int32_t* part);

// Appends the neighbours of nodes first..last-1, each at position next[v - first], which advances.
PYGDIST_API int32_t pygdist_fill_neighbours(const pygdist_edges* edges, int64_t first, int64_t last, int64_t* next,
                                            int32_t* neighbour);

// part[v], -1 at first, of nodes first..first+count-1, whose neighbours are given: by LDG, or by Fennel.
PYGDIST_API int32_t pygdist_place_nodes(int64_t first, int64_t count, const int64_t* indptr, const int32_t* neighbour,
                                        int32_t num_parts, int64_t capacity, int32_t fennel, double alpha, double gamma,
                                        int64_t* load, int32_t* part);

// The rows near a rank's own, and the costs of computing one again and of fetching it.
typedef struct pygdist_dependencies {
  int64_t num_rows;        // owned, then halo, then those beyond
  int64_t num_owned;
  int64_t num_halo;        // sources of the edges of owned rows
  const int64_t* indptr;   // num_rows + 1 offsets: in-edges of each row; rows num_hops away have none
  const int64_t* index;    // source of each edge
  // By hop, num_hops + 1 numbers each; seconds are forward and backward together.
  const double* row_s;     // the dense work for a row between hop k (the start, for 0) and the next
  const double* edge_s;    // aggregating over an edge in hop k; the first is not used
  const double* fetch_s;   // fetching a row for hop k; the first is not used
  const double* row_bytes; // memory of a row after hop k
  double bytes_per_edge;   // memory of an edge of a replica
  double max_bytes;        // of all replicas
  double share;            // compute this share of the halo rows of each hop, the cheapest ones; negative: costs decide
  int32_t num_hops;
} pygdist_dependencies;

// chosen[(hop - 1) * num_halo + i]: halo row i is a replica before hop `hop`; else it is fetched.
PYGDIST_API int32_t pygdist_choose_dependencies(const pygdist_dependencies* given, uint8_t* chosen);

// The consequences of a choice. needed[hop * num_rows + row], hops from 0: the row is a replica whose values after that
// hop are needed. edges[2 (hop - 1)]: the edges that hop `hop` aggregates over, followed by the number of these that
// come from rows of this rank. Only the rows and edges of `given` are read.
PYGDIST_API int32_t pygdist_follow_dependencies(const pygdist_dependencies* given, const uint8_t* chosen,
                                                uint8_t* needed, int64_t* edges);

// Edges as text: one edge per line, ids in the first two columns, columns separated by blanks or a comma; `#` begins a
// comment.
typedef struct pygdist_text {
  int64_t max_id;   // the largest id allowed
  int64_t line;     // lines read so far; after a failure the one at fault
  int64_t count;    // edges of this call
  int64_t id;       // after PYGDIST_BAD_ID the one at fault
  int32_t columns;  // of every line; 0 before the first edge
} pygdist_text;

// Reads whole lines and writes the edges into edge[k][2], which has room for one edge per 3 characters.
PYGDIST_API int32_t pygdist_parse_edges(const char* text, int64_t length, pygdist_text* state, int64_t* edge);

// A stable sort of fewer than 2^31 keys of 0..num_keys-1: order[indptr[k]..indptr[k + 1]-1] are the positions of key k.
PYGDIST_API int32_t pygdist_counting_sort(const int32_t* key, int64_t count, int64_t num_keys, int64_t* indptr,
                                          int32_t* order);

// kept[i * columns + j] is 0 if the highest 24 of 64 bits, a hash of seed, call, node[i] and j, are below `threshold`,
// else 1; the same as pygdist.graph.links.drawn.
PYGDIST_API int32_t pygdist_keep_values(const int64_t* node, int64_t num_rows, int64_t columns, uint64_t seed,
                                        uint64_t call, uint64_t threshold, int32_t num_threads, uint8_t* kept);

// A mini-batch and the hop by which it grows, one thread per call. Of the matrix only indptr, index and perm are read;
// it has as many columns as rows, fewer than 2^31.
typedef struct pygdist_hop {
  int64_t* node;      // the batch's nodes, seeds first; room for num_edges more
  int64_t num_nodes;  // so far
  int64_t num_seeds;
  int64_t first;      // nodes first..num_nodes-1 are expanded
  int64_t number;     // of the hop, from 0
  int64_t fan_out;    // edges of each; -1: all
  int64_t* source;    // of each edge, as a position in `node`
  int64_t* target;    // the same; ascending
  int64_t* edge;      // position of the edge in the matrix, or perm of that
  int64_t num_edges;  // of the hop
  uint64_t seed;
  uint64_t epoch;
  int32_t replace;
} pygdist_hop;

// Sets num_edges, the length that the arrays of edges must have.
PYGDIST_API int32_t pygdist_count_hop(const pygdist_csr* csr, pygdist_hop* hop);

// Samples the edges of a hop after pygdist_count_hop, and appends their sources to the nodes. PYGDIST_BAD_ID: a node is
// given twice.
PYGDIST_API int32_t pygdist_sample_hop(const pygdist_csr* csr, pygdist_hop* hop);

// The key of a hop's random numbers: it depends on the seed, the epoch, the seed nodes and the number of the hop.
PYGDIST_API int32_t pygdist_hop_key(const pygdist_hop* hop, uint64_t* key);

// Samples the edges into all nodes of the hop, which are rows of the matrix, after pygdist_count_hop; id[i], the node's id
// in the whole graph, and the key choose the edges, as pygdist_sample_hop does. Sources are columns of the matrix here.
PYGDIST_API int32_t pygdist_draw(const pygdist_csr* csr, pygdist_hop* hop, uint64_t key, const int64_t* id);

// Ends a hop whose edges pygdist_draw sampled, here or elsewhere: `source` has the ids of nodes, which become positions;
// those that are new are appended to the nodes. PYGDIST_BAD_ID as above.
PYGDIST_API int32_t pygdist_place_hop(pygdist_hop* hop);

// Copies `count` rows of `row_bytes` bytes: row source[i] of `from` becomes row target[i] of `to`. Null is row i.
// PYGDIST_BAD_ID if a row is not among the num_from and num_to rows of the two.
PYGDIST_API int32_t pygdist_copy_rows(const void* from, int64_t num_from, const int64_t* source, void* to,
                                      int64_t num_to, const int64_t* target, int64_t count, int64_t row_bytes);

// Finds the edges among the nodes, and adds no node. `first` is 0 and `fan_out` -1, the arrays are as long as
// pygdist_count_hop says; num_edges becomes their number.
PYGDIST_API int32_t pygdist_induce(const pygdist_csr* csr, pygdist_hop* hop);

#ifdef __cplusplus
}
#endif

#endif  // PYGDIST_NATIVE_H
