// Composition of heads for one query and one tile of keys, forward and backward: register arithmetic with vectors that run along
// the keys.
//
// N heads = G groups of n, R rank, V lanes of a vector, L = U V keys of a tile, which is a panel of gemm.h. A tile of scores lies in a
// row of a chunk: its heads are kKeys floats apart. Equations and letters: ../../README.md.

#pragma once

#include "gemm.h"

namespace dcformer {

constexpr int64_t kKeys = 64;  // keys of a chunk
// Ranks are taken in steps of at most two: four sums a part and vector are what the registers hold.
constexpr int64_t kRanks = 2;

// One composition as a tile sees it. A missing part is a null pointer of rank 0. Rows of `query` and `key` are w1, w2, gate.
struct Tile {
  int64_t heads;         // N
  int64_t groups;        // G
  const float* base;     // [G, n, n]
  const float* query;    // [2 query_rank + 1, N], of one query
  int64_t query_rank;
  const float* key;      // [2 key_rank + 1, N, L], packed
  int64_t key_rank;
};

// Where the gradients of one tile are added. Sums over keys stay vectors until all tiles are done.
struct TileGrads {
  float* base;   // [G, n, n, V]
  float* query;  // [2 query_rank + 1, N, V], of one query
  float* key;    // [2 key_rank + 1, N, L]
};

// What one step works on: ranks r.. of the group that starts at `head`. Stores of vectors may alias anything, so that all this is
// read into locals once.
struct Step {
  int64_t n, heads, head, r;

  bool first() const {  // which also makes identity and gates
    return r == 0;
  }
};

template <typename T>
T* offset(T* part, int64_t floats) {  // nothing stays nothing
  return part ? part + floats : nullptr;
}

// Gates of a tile: 1 + qg + kg is the factor of x[m]. A missing part is zeros that are read again for every head.
struct Gates {
  const float *query, *key;
  int64_t query_step, key_step;

  Gates(const Tile& t, int64_t head) {
    static constexpr float zeros[L] = {};
    query = t.query ? t.query + 2 * t.query_rank * t.heads + head : zeros;
    query_step = t.query ? 1 : 0;
    key = t.key ? t.key + (2 * t.key_rank * t.heads + head) * L : zeros;
    key_step = t.key ? L : 0;
  }
  C10_ALWAYS_INLINE Vec at(int64_t m, int64_t u) const {
    return Vec(1.0f + query[m * query_step]) + Vec::loadu(key + m * key_step + u * V);
  }
};

// sums[r] = sum over the heads of a group of x[n] w[r, n], for query-wise w (broadcast) and key-wise w (along the keys).
template <int RQ, int RK>
C10_ALWAYS_INLINE void mixed_sums(
    const float* x, int64_t n, const float* wq, const float* wk, int64_t heads, Vec (&sq)[kRanks][U], Vec (&sk)[kRanks][U]) {
#pragma GCC unroll 2
  for (int64_t r = 0; r < kRanks; ++r) {
#pragma GCC unroll 2
    for (int64_t u = 0; u < U; ++u) {
      sq[r][u] = sk[r][u] = Vec(0.0f);
    }
  }
  for (int64_t i = 0; i < n; ++i) {
#pragma GCC unroll 2
    for (int64_t u = 0; u < U; ++u) {
      const Vec value = Vec::loadu(x + i * kKeys + u * V);
#pragma GCC unroll 2
      for (int64_t r = 0; r < RQ; ++r) {
        sq[r][u] = fmadd(value, Vec(wq[r * heads + i]), sq[r][u]);
      }
#pragma GCC unroll 2
      for (int64_t r = 0; r < RK; ++r) {
        sk[r][u] = fmadd(value, Vec::loadu(wk + (r * heads + i) * L + u * V), sk[r][u]);
      }
    }
  }
}

// y = the part of Compose(x) that a step makes, added to y unless it is the first. y may be x where one step does all.
template <int RQ, int RK, bool First>
void forward_step(const Tile& t, const Step& s, const float* x, float* y) {
  const int64_t n = s.n, heads = s.heads;
  const float* const q1 = offset(t.query, s.r * heads + s.head);
  const float* const q2 = offset(q1, t.query_rank * heads);
  const float* const k1 = offset(t.key, (s.r * heads + s.head) * L);
  const float* const k2 = offset(k1, t.key_rank * heads * L);
  const Gates gates(t, s.head);
  Vec hq[kRanks][U], hk[kRanks][U];
  mixed_sums<RQ, RK>(x, n, q1, k1, heads, hq, hk);
  for (int64_t m = 0; m < n; ++m) {
#pragma GCC unroll 2
    for (int64_t u = 0; u < U; ++u) {
      Vec acc = First ? Vec::loadu(x + m * kKeys + u * V) * gates.at(m, u) : Vec::loadu(y + m * kKeys + u * V);
#pragma GCC unroll 2
      for (int64_t i = 0; i < RQ; ++i) {
        acc = fmadd(hq[i][u], Vec(q2[i * heads + m]), acc);
      }
#pragma GCC unroll 2
      for (int64_t i = 0; i < RK; ++i) {
        acc = fmadd(hk[i][u], Vec::loadu(k2 + (i * heads + m) * L + u * V), acc);
      }
      acc.store(y + m * kKeys + u * V);
    }
  }
}

// y += x base, for one group. y is not x.
inline void forward_base(const float* base, int64_t n, const float* x, float* y) {
  for (int64_t m = 0; m < n; ++m) {
    for (int64_t u = 0; u < U; ++u) {
      Vec acc = Vec::loadu(y + m * kKeys + u * V);
      for (int64_t i = 0; i < n; ++i) {
        acc = fmadd(Vec::loadu(x + i * kKeys + u * V), Vec(base[i * n + m]), acc);
      }
      acc.store(y + m * kKeys + u * V);
    }
  }
}

C10_ALWAYS_INLINE void add_to(float* to, const Vec& value) {
  (Vec::loadu(to) + value).store(to);
}

// dx = the part that a step makes of dy, added to dx unless it is the first; adds to the gradients. dx may be dy where one step does
// all. With Forward also y = the same of x, since most of what that takes is at hand.
template <int RQ, int RK, bool First, bool Forward>
void backward_step(const Tile& t, const TileGrads& d, const Step& s, const float* x, const float* dy, float* dx, float* y) {
  const int64_t n = s.n, heads = s.heads, at = s.r * heads + s.head, query_rows = t.query_rank * heads, key_rows = t.key_rank * heads;
  const float *const q1 = offset(t.query, at), *const q2 = offset(q1, query_rows);
  const float *const k1 = offset(t.key, at * L), *const k2 = offset(k1, key_rows * L);
  float *const dq1 = offset(d.query, at * V), *const dq2 = offset(dq1, query_rows * V);
  float *const dk1 = offset(d.key, at * L), *const dk2 = offset(dk1, key_rows * L);
  float* const dquery_gate = offset(d.query, (2 * query_rows + s.head) * V);
  float* const dkey_gate = offset(d.key, (2 * key_rows + s.head) * L);
  const Gates gates(t, s.head);
  Vec hq[kRanks][U], hk[kRanks][U], dhq[kRanks][U], dhk[kRanks][U];
  mixed_sums<RQ, RK>(x, n, q1, k1, heads, hq, hk);
  mixed_sums<RQ, RK>(dy, n, q2, k2, heads, dhq, dhk);
  for (int64_t i = 0; i < n; ++i) {
    Vec value[U], dvalue[U], acc[U];
#pragma GCC unroll 2
    for (int64_t u = 0; u < U; ++u) {
      const int64_t o = i * kKeys + u * V;
      value[u] = Vec::loadu(x + o);
      dvalue[u] = Vec::loadu(dy + o);
      const Vec gate = First ? gates.at(i, u) : Vec(0.0f);
      acc[u] = First ? dvalue[u] * gate : Vec::loadu(dx + o);
      if (Forward) {
        Vec out = First ? value[u] * gate : Vec::loadu(y + o);
#pragma GCC unroll 2
        for (int64_t j = 0; j < RQ; ++j) {
          out = fmadd(hq[j][u], Vec(q2[j * heads + i]), out);
        }
#pragma GCC unroll 2
        for (int64_t j = 0; j < RK; ++j) {
          out = fmadd(hk[j][u], Vec::loadu(k2 + (j * heads + i) * L + u * V), out);
        }
        out.store(y + o);
      }
    }
    if (First && dquery_gate) {
      add_to(dquery_gate + i * V, fmadd(value[0], dvalue[0], value[1] * dvalue[1]));
    }
    if (First && dkey_gate) {
#pragma GCC unroll 2
      for (int64_t u = 0; u < U; ++u) {
        float* const to = dkey_gate + i * L + u * V;
        fmadd(value[u], dvalue[u], Vec::loadu(to)).store(to);
      }
    }
#pragma GCC unroll 2
    for (int64_t j = 0; j < RQ; ++j) {
      const int64_t o = j * heads + i;
      const Vec w(q1[o]);
      Vec sum1 = Vec::loadu(dq1 + o * V), sum2 = Vec::loadu(dq2 + o * V);
#pragma GCC unroll 2
      for (int64_t u = 0; u < U; ++u) {
        acc[u] = fmadd(dhq[j][u], w, acc[u]);
        sum1 = fmadd(dhq[j][u], value[u], sum1);
        sum2 = fmadd(hq[j][u], dvalue[u], sum2);
      }
      sum1.store(dq1 + o * V);
      sum2.store(dq2 + o * V);
    }
#pragma GCC unroll 2
    for (int64_t j = 0; j < RK; ++j) {
#pragma GCC unroll 2
      for (int64_t u = 0; u < U; ++u) {
        const int64_t o = (j * heads + i) * L + u * V;
        acc[u] = fmadd(dhk[j][u], Vec::loadu(k1 + o), acc[u]);
        fmadd(dhk[j][u], value[u], Vec::loadu(dk1 + o)).store(dk1 + o);
        fmadd(hk[j][u], dvalue[u], Vec::loadu(dk2 + o)).store(dk2 + o);
      }
    }
#pragma GCC unroll 2
    for (int64_t u = 0; u < U; ++u) {
      acc[u].store(dx + i * kKeys + u * V);
    }
  }
}

// dx += dy base^T and dbase += x dy^T, for one group. dx is not dy.
inline void backward_base(const float* base, float* dbase, int64_t n, const float* x, const float* dy, float* dx) {
  for (int64_t i = 0; i < n; ++i) {
    Vec value[U], acc[U];
    for (int64_t u = 0; u < U; ++u) {
      value[u] = Vec::loadu(x + i * kKeys + u * V);
      acc[u] = Vec::loadu(dx + i * kKeys + u * V);
    }
    for (int64_t m = 0; m < n; ++m) {
      Vec sum = Vec::loadu(dbase + (i * n + m) * V);
      for (int64_t u = 0; u < U; ++u) {
        const Vec other = Vec::loadu(dy + m * kKeys + u * V);
        acc[u] = fmadd(other, Vec(base[i * n + m]), acc[u]);
        sum = fmadd(value[u], other, sum);
      }
      sum.store(dbase + (i * n + m) * V);
    }
    for (int64_t u = 0; u < U; ++u) {
      acc[u].store(dx + i * kKeys + u * V);
    }
  }
}

// Calls body(ranks of the query-wise part in this step, of the key-wise part, the step) for all groups until all ranks are done.
template <typename Body>
inline void for_steps(const Tile& t, const Body& body) {
  const int64_t rq = t.query_rank, rk = t.key_rank, n = t.heads / t.groups;
  int64_t r = 0;
  do {
    for (int64_t g = 0; g < t.groups; ++g) {
      body(std::clamp<int64_t>(rq - r, 0, kRanks), std::clamp<int64_t>(rk - r, 0, kRanks), Step{n, t.heads, g * n, r});
    }
    r += kRanks;
  } while (r < std::max(rq, rk));
}

// Whether the result may be written over the input.
inline bool in_place(const Tile& t) {
  return !t.base && t.query_rank <= kRanks && t.key_rank <= kRanks;
}

inline void copy_tile(int64_t heads, const float* from, float* to) {
  for (int64_t n = 0; n < heads; ++n) {
    for (int64_t u = 0; u < U; ++u) {
      Vec::loadu(from + n * kKeys + u * V).store(to + n * kKeys + u * V);
    }
  }
}

// y = Compose(x) for all heads of one query at L keys. y may be x; `spare` holds N kKeys floats.
inline void forward(const Tile& t, const float* x, float* y, float* spare) {
  using Function = void (*)(const Tile&, const Step&, const float*, float*);
  constexpr Function first[3][3] = {
      {forward_step<0, 0, true>, forward_step<0, 1, true>, forward_step<0, 2, true>},
      {forward_step<1, 0, true>, forward_step<1, 1, true>, forward_step<1, 2, true>},
      {forward_step<2, 0, true>, forward_step<2, 1, true>, forward_step<2, 2, true>}};
  constexpr Function later[3][3] = {
      {nullptr, forward_step<0, 1, false>, forward_step<0, 2, false>},
      {forward_step<1, 0, false>, forward_step<1, 1, false>, forward_step<1, 2, false>},
      {forward_step<2, 0, false>, forward_step<2, 1, false>, forward_step<2, 2, false>}};
  if (x == y && !in_place(t)) {
    copy_tile(t.heads, x, spare);
    x = spare;
  }
  for_steps(t, [&](int64_t rq, int64_t rk, const Step& s) {
    const int64_t o = s.head * kKeys;
    (s.first() ? first : later)[rq][rk](t, s, x + o, y + o);
    if (s.first() && t.base) {
      forward_base(t.base + s.head * s.n, s.n, x + o, y + o);
    }
  });
}

// dy of y = Compose(x) becomes dx, and adds the gradients of the composition to d. With Forward also makes y.
template <bool Forward>
void backward(const Tile& t, const TileGrads& d, const float* x, float* dy, float* y, float* spare) {
  using Function = void (*)(const Tile&, const TileGrads&, const Step&, const float*, const float*, float*, float*);
  constexpr bool F = Forward;
  constexpr Function first[3][3] = {
      {backward_step<0, 0, true, F>, backward_step<0, 1, true, F>, backward_step<0, 2, true, F>},
      {backward_step<1, 0, true, F>, backward_step<1, 1, true, F>, backward_step<1, 2, true, F>},
      {backward_step<2, 0, true, F>, backward_step<2, 1, true, F>, backward_step<2, 2, true, F>}};
  constexpr Function later[3][3] = {
      {nullptr, backward_step<0, 1, false, F>, backward_step<0, 2, false, F>},
      {backward_step<1, 0, false, F>, backward_step<1, 1, false, F>, backward_step<1, 2, false, F>},
      {backward_step<2, 0, false, F>, backward_step<2, 1, false, F>, backward_step<2, 2, false, F>}};
  const float* from = dy;
  if (!in_place(t)) {
    copy_tile(t.heads, dy, spare);
    from = spare;
  }
  for_steps(t, [&](int64_t rq, int64_t rk, const Step& s) {
    const int64_t o = s.head * kKeys;
    (s.first() ? first : later)[rq][rk](t, d, s, x + o, from + o, dy + o, offset(y, o));
    if (s.first() && t.base) {
      backward_base(t.base + s.head * s.n, d.base + s.head * s.n * V, s.n, x + o, from + o, dy + o);
      if (Forward) {
        forward_base(t.base + s.head * s.n, s.n, x + o, y + o);
      }
    }
  });
}

}  // namespace dcformer
