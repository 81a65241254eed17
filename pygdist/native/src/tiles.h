// Feature tiles: a row of any width is walked in groups of vectors that stay in registers.
//
// Included by the kernels inside the namespace of one instruction set, so that no two builds share a symbol.

// A value stored in 16 bits: the upper half of a float. Sums are kept in float.
struct bf16 {
  uint16_t bits;
};

// The type in which values stored as T are computed.
template <class T>
struct ComputedIn {
  using type = T;
};
template <>
struct ComputedIn<bf16> {
  using type = float;
};
template <class T>
using Computed = typename ComputedIn<T>::type;

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
constexpr int kLanes = PYGDIST_VECTOR_BYTES / static_cast<int>(sizeof(Computed<T>));

// Accumulators per tile: half of the registers of SSE2 and AVX2, which leaves room for the message and the weight.
constexpr int kTileVectors = 8;

// Hide from the compiler how a value was computed, so that it stays in a register: GCC works out the address of each
// vector of a row by itself, until the registers do not suffice, and broadcasts a number again wherever it is used.
template <class T>
inline void compute_once(const T*& pointer) {
  asm("" : "+r"(pointer));
}

template <class V>
inline void compute_once(V& vector) {
#ifdef __x86_64__
  if constexpr (sizeof(V) > 8) asm("" : "+v"(vector));
#elif defined(__aarch64__)
  if constexpr (sizeof(V) == 16) asm("" : "+w"(vector));
#else
  (void)vector;
#endif
}

template <int Lanes, class T>
inline Vector<Computed<T>, Lanes> load_vector(const T* from) {
  Vector<Computed<T>, Lanes> value;
  if constexpr (sizeof(T) == sizeof(Computed<T>)) {
    __builtin_memcpy(&value, from, sizeof(value));
  } else {
    Vector<uint16_t, Lanes> half;
    __builtin_memcpy(&half, from, sizeof(half));
    if constexpr (Lanes == 1) {
      const uint32_t bits = static_cast<uint32_t>(half) << 16;
      __builtin_memcpy(&value, &bits, sizeof(value));
    } else {
      const auto bits = __builtin_convertvector(half, Vector<uint32_t, Lanes>) << 16;
      __builtin_memcpy(&value, &bits, sizeof(value));
    }
  }
  return value;
}

// To bfloat16 it rounds to the nearest, ties to even, as torch does; a NaN stays one.
template <int Lanes, class T>
inline void store_vector(T* to, const Vector<Computed<T>, Lanes>& value) {
  if constexpr (sizeof(T) == sizeof(Computed<T>)) {
    __builtin_memcpy(to, &value, sizeof(value));
  } else {
    Vector<uint32_t, Lanes> bits;
    __builtin_memcpy(&bits, &value, sizeof(bits));
    const auto rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const auto quiet = (bits >> 16) | 0x40;
    if constexpr (Lanes == 1) {
      to->bits = static_cast<uint16_t>(value == value ? rounded : quiet);
    } else {
      const auto half = __builtin_convertvector((value == value) ? rounded : quiet, Vector<uint16_t, Lanes>);
      __builtin_memcpy(to, &half, sizeof(half));
    }
  }
}

// `Count` adjacent vectors of a row, from column `first`.
template <class T, int L, int C>
struct Tile {
  static constexpr int Lanes = L;
  static constexpr int Count = C;
  using V = Vector<Computed<T>, L>;

  int64_t first;

  // The tile's part of a row, for several loads.
  inline const T* part(const T* row) const {
    const T* start = row + first;
    compute_once(start);
    return start;
  }

  // The column of vector k, counted from the first.
  static constexpr int64_t column(int k) { return k * Lanes; }

  inline V load_part(const T* part, int k) const { return load_vector<L>(part + column(k)); }

  inline V load(const T* row, int k) const { return load_part(row + first, k); }

  inline void store(T* row, int k, const V& value) const { store_vector<L>(row + first + column(k), value); }

  // The same, to add to a row: columns that two tiles cover must be added to once.
  inline void store_own(T* row, int k, const V& value) const { store(row, k, value); }

  // Brings the tile's part of a row that is needed soon into the cache.
  inline void prefetch(const T* row) const {
    const char* start = reinterpret_cast<const char*>(part(row));
    for (int offset = 0; offset < Count * Lanes * static_cast<int>(sizeof(T)); offset += 64) {
      __builtin_prefetch(start + offset);
    }
  }
};

// One vector that ends where the columns end: those before `own` belong to the tile before.
template <class T, int L>
struct LastTile : Tile<T, L, 1> {
  using typename Tile<T, L, 1>::V;
  int64_t own;

  LastTile(int64_t first, int64_t own) : Tile<T, L, 1>{first}, own(own) {}

  inline void store_own(T* row, int, const V& value) const {
    T lanes[L];
    store_vector<L>(lanes, value);
    for (int lane = 0; lane < L; ++lane) {
      if (this->first + lane >= own) row[this->first + lane] = lanes[lane];
    }
  }
};

// `Count` vectors that end where the columns end: the last one overlaps the one before, which is computed in the same
// walk over the entries.
template <class T, int L, int C>
struct RaggedTile : Tile<T, L, C> {
  using typename Tile<T, L, C>::V;
  int64_t over;  // columns that the last two vectors share

  RaggedTile(int64_t first, int64_t over) : Tile<T, L, C>{first}, over(over) {}

  inline int64_t column(int k) const { return k * L - (k == C - 1 ? over : 0); }
  inline V load_part(const T* part, int k) const { return load_vector<L>(part + column(k)); }
  inline V load(const T* row, int k) const { return load_part(row + this->first, k); }
  inline void store(T* row, int k, const V& value) const { store_vector<L>(row + this->first + column(k), value); }
  // both vectors have read what they add to before either is stored
  inline void store_own(T* row, int k, const V& value) const { store(row, k, value); }
};

// The numbers of vectors that tiles may have: any number, for fewer walks over the entries, or powers of two, for less
// code. Powers of two are not for adding to a row: their last tile takes the columns that it shares for its own.
enum class Widths { kAny, kPowersOfTwo };

// Covers columns first..last-1, at most `Count` vectors, with one tile. A ragged tile that shares no column stands for
// whole vectors: one form for both is half the code.
template <class T, int Lanes, int Count, class Body>
inline void cover_by_any(int64_t first, int64_t last, const Body& body) {
  if constexpr (Count > 1) {
    if (last - first <= (Count - 1) * Lanes) return cover_by_any<T, Lanes, Count - 1>(first, last, body);
    body(RaggedTile<T, Lanes, Count>(first, first + Count * Lanes - last));
  } else if (last - first == Lanes) {
    body(Tile<T, Lanes, 1>{first});
  } else {
    body(LastTile<T, Lanes>(last - Lanes, first));
  }
}

// Covers columns first..last-1 with tiles of at most `Count` vectors. The last vector, or the last tile, ends where the
// columns end, so it may overlap the one before it: those columns are computed twice, with equal results, which is
// cheaper than masks or a scalar tail. The columns from `begin` on are no fewer than one vector.
template <class T, Widths W, int Lanes, int Count, class Body>
inline void cover(int64_t begin, int64_t first, int64_t last, const Body& body) {
  constexpr int64_t kWidth = Count * Lanes;
  for (; first + kWidth <= last; first += kWidth) body(Tile<T, Lanes, Count>{first});
  if (first >= last) return;
  if constexpr (W == Widths::kAny) {
    cover_by_any<T, Lanes, Count>(first, last, body);
  } else {
    if constexpr (Count > 1) {
      constexpr int kFewer = Count / 2;
      const bool fewer_reach = last - first <= kFewer * Lanes;
      if (fewer_reach || last - begin < kWidth) return cover<T, W, Lanes, kFewer>(begin, first, last, body);
    }
    body(Tile<T, Lanes, Count>{last - kWidth});
  }
}

// Calls `body(tile)` for tiles that cover columns first..last-1. Fewer columns than a vector has lanes use a narrower
// vector.
template <class T, Widths W = Widths::kPowersOfTwo, int Lanes = kLanes<T>, class Body>
inline void for_each_tile(int64_t first, int64_t last, const Body& body) {
  if constexpr (Lanes > 1) {
    if (last - first < Lanes) return for_each_tile<T, W, Lanes / 2>(first, last, body);
  }
  if constexpr (Lanes == kLanes<T>) {
    cover<T, W, Lanes, kTileVectors>(first, first, last, body);
  } else if constexpr (W == Widths::kAny && Lanes > 1) {  // fewer than two vectors
    if (last - first > Lanes) return body(RaggedTile<T, Lanes, 2>(first, first + 2 * Lanes - last));
    body(Tile<T, Lanes, 1>{first});
  } else {
    cover<T, Widths::kPowersOfTwo, Lanes, 1>(first, first, last, body);
  }
}

// Calls `body(tile)` for tiles that cover columns first..last-1 and share none, for sums that are kept in memory: tiles
// of `Count` vectors, then of one, then narrower and narrower ones.
template <class T, int Count, int Lanes = kLanes<T>, class Body>
inline void for_each_apart(int64_t first, int64_t last, const Body& body) {
  for (; first + Count * Lanes <= last; first += Count * Lanes) body(Tile<T, Lanes, Count>{first});
  if constexpr (Count > 1) {
    for_each_apart<T, 1, Lanes>(first, last, body);
  } else if constexpr (Lanes > 1) {
    for_each_apart<T, 1, Lanes / 2>(first, last, body);
  }
}
