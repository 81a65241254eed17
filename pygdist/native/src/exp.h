// The exponential function over an array.
//
// Included by the kernels inside the namespace of one instruction set, after tiles.h.

// exp(x) for x <= 0, to about two units in the last place: x = n ln 2 + r, a polynomial in r, and n into the exponent.
// (Coefficients: the Taylor series through r^7; |r| <= ln(2) / 2 leaves an error of 3e-9.)
template <int Lanes>
inline Vector<float, Lanes> exp_of(const Vector<float, Lanes>& x) {
  using V = Vector<float, Lanes>;
  using N = Vector<int32_t, Lanes>;
  const V zero = V{};
  const V clamped = x > zero - 87.0f ? x : zero - 87.0f;  // below, the result is denormal: 0 then
  const N n = __builtin_convertvector(clamped * 1.44269504088896341f - 0.5f, N);
  const V whole = __builtin_convertvector(n, V);
  const V r = (clamped - whole * 0.693359375f) + whole * 2.12194440e-4f;  // ln 2 in two parts
  V power = zero + 1.98412698e-4f;
  power = power * r + 1.38888889e-3f;
  power = power * r + 8.33333333e-3f;
  power = power * r + 4.16666667e-2f;
  power = power * r + 1.66666667e-1f;
  power = power * r + 0.5f;
  power = power * r + 1.0f;
  power = power * r + 1.0f;
  const N exponent = (n + 127) << 23;
  V scale;
  __builtin_memcpy(&scale, &exponent, sizeof(scale));
  const V result = x < zero - 87.0f ? zero : power * scale;
  return x == x ? result : x;
}

template <int Lanes>
inline Vector<double, Lanes> exp_of(const Vector<double, Lanes>& x) {
  Vector<double, Lanes> result;
  for (int lane = 0; lane < Lanes; ++lane) result[lane] = __builtin_exp(x[lane]);
  return result;
}

// Replaces `count` values, none of them positive, by their exponentials.
inline void exp_in_place(float* values, int64_t count) {
  constexpr int kWide = kLanes<float>;
  int64_t i = 0;
  for (; i + kWide <= count; i += kWide) store_vector<kWide>(values + i, exp_of<kWide>(load_vector<kWide>(values + i)));
  for (; i < count; ++i) values[i] = __builtin_expf(values[i]);
}

inline void exp_in_place(double* values, int64_t count) {
  for (int64_t i = 0; i < count; ++i) values[i] = __builtin_exp(values[i]);
}
