// Feature tiles: a row of any width is walked in groups of vectors that stay in registers.
//
// Included by kernels.cpp inside the namespace of one instruction set, so that no two builds share a symbol.

// A vector of `Lanes` values, in the vector extension of GCC and Clang; one lane is the plain scalar.
template <class T, int Lanes>
struct VectorOf {
  typedef T type __attribute__((vector_size(Lanes * sizeof(T))));
};
template <class T>
struct VectorOf<T, 1> {
  using type = T;
};
template <class T, int Lanes>
using Vector = typename VectorOf<T, Lanes>::type;

template <class T>
constexpr int kLanes = PYGDIST_VECTOR_BYTES / static_cast<int>(sizeof(T));

// Accumulators per tile: half of the registers of SSE2 and AVX2, which leaves room for the message and the weight.
constexpr int kTileVectors = 8;

// `Count` adjacent vectors of a row, from column `first`.
template <class T, int L, int C>
struct Tile {
  static constexpr int Lanes = L;
  static constexpr int Count = C;
  using V = Vector<T, L>;

  int64_t first;

  inline V load(const T* row, int k) const {
    V value;
    __builtin_memcpy(&value, row + first + k * Lanes, sizeof(V));
    return value;
  }

  inline void store(T* row, int k, const V& value) const {
    __builtin_memcpy(row + first + k * Lanes, &value, sizeof(V));
  }

  // Brings the tile's part of a row that is needed soon into the cache.
  inline void prefetch(const T* row) const {
    const char* start = reinterpret_cast<const char*>(row + first);
    for (int offset = 0; offset < Count * Lanes * static_cast<int>(sizeof(T)); offset += 64) {
      __builtin_prefetch(start + offset);
    }
  }
};

// Covers columns first..features-1 with tiles of at most `Count` vectors. The last tile ends where the row ends, so it
// may overlap the one before it: those columns are computed twice, with equal results, which is cheaper than masks or a
// scalar tail.
template <class T, int Lanes, int Count, class Body>
inline void cover(int64_t first, int64_t features, const Body& body) {
  constexpr int64_t kWidth = Count * Lanes;
  for (; first + kWidth <= features; first += kWidth) body(Tile<T, Lanes, Count>{first});
  if (first >= features) return;
  if constexpr (Count > 1) {
    // Half as many vectors would not reach the end: one wide tile is one walk over the entries less.
    const bool half_reaches = features - first <= kWidth / 2;
    if (half_reaches || features < kWidth) return cover<T, Lanes, Count / 2>(first, features, body);
  }
  body(Tile<T, Lanes, Count>{features - kWidth});
}

// Calls `body(tile)` for tiles that cover columns 0..features-1. Rows narrower than a vector use a narrower vector.
template <class T, int Lanes = kLanes<T>, class Body>
inline void for_each_tile(int64_t features, const Body& body) {
  if constexpr (Lanes > 1) {
    if (features < Lanes) return for_each_tile<T, Lanes / 2>(features, body);
  }
  cover<T, Lanes, Lanes == kLanes<T> ? kTileVectors : 1>(0, features, body);
}
