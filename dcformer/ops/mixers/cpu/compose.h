// Composition of heads for one query and one tile of keys, forward and backward: register arithmetic with vectors that run along
// the keys.
//
// N heads = G groups of n, R rank, V lanes of a vector, L = U V keys of a tile. A tile of scores lies in a row of a chunk: its
// heads are kKeys floats apart. Equations and letters: ../../README.md.

#pragma once

#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>

#include <algorithm>
#include <cstdint>

namespace dcformer {

using Vec = at::vec::Vectorized<float>;
using at::vec::fmadd;

constexpr int64_t V = Vec::size();
constexpr int64_t U = 2;
constexpr int64_t L = U * V;
constexpr int64_t kKeys = 64;  // keys of a chunk
// Ranks are taken in steps of at most two: four sums a part and vector are what the registers hold.
constexpr int64_t kRanks = 2;

// One composition as a tile sees it. A missing part is a null pointer. Rows of `query` and `key` are w1, w2, gate.
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

C10_ALWAYS_INLINE Vec broadcast(const float* p) {
  return Vec(*p);
}

// The factor of x[m] that all of its gates make: 1 + qg + kg.
C10_ALWAYS_INLINE void gates(const Tile& t, int64_t m, Vec* gate) {
  const Vec query(t.query ? 1.0f + t.query[2 * t.query_rank * t.heads + m] : 1.0f);
  for (int64_t u = 0; u < U; ++u) {
    gate[u] = t.key ? query + Vec::loadu(t.key + (2 * t.key_rank * t.heads + m) * L + u * V) : query;
  }
}

// sums[r] = sum over the heads of a group of x[n] w[r, n], for query-wise w (broadcast) and key-wise w (along the keys).
template <int RQ, int RK>
C10_ALWAYS_INLINE void mixed_sums(
    const float* x, int64_t n, const float* wq, const float* wk, int64_t heads, Vec (&sq)[kRanks][U], Vec (&sk)[kRanks][U]) {
  for (int64_t r = 0; r < kRanks; ++r) {
    for (int64_t u = 0; u < U; ++u) {
      sq[r][u] = sk[r][u] = Vec(0.0f);
    }
  }
  for (int64_t i = 0; i < n; ++i) {
#pragma GCC unroll 4
    for (int64_t u = 0; u < U; ++u) {
      const Vec value = Vec::loadu(x + i * kKeys + u * V);
#pragma GCC unroll 4
      for (int64_t r = 0; r < RQ; ++r) {
        sq[r][u] = fmadd(value, broadcast(wq + r * heads + i), sq[r][u]);
      }
#pragma GCC unroll 4
      for (int64_t r = 0; r < RK; ++r) {
        sk[r][u] = fmadd(value, Vec::loadu(wk + (r * heads + i) * L + u * V), sk[r][u]);
      }
    }
  }
}

// y += the part of Compose(x) that ranks r.. of one group make; the first step also makes identity, gates and base.
// y may be x where one step does all and there is no base.
template <int RQ, int RK>
void forward_step(const Tile& t, int64_t g, int64_t r, bool first, const float* x, float* y) {
  const int64_t n = t.heads / t.groups, head = g * n;
  const float* q1 = RQ ? t.query + r * t.heads + head : nullptr;
  const float* q2 = RQ ? t.query + (t.query_rank + r) * t.heads + head : nullptr;
  const float* k1 = RK ? t.key + (r * t.heads + head) * L : nullptr;
  const float* k2 = RK ? t.key + ((t.key_rank + r) * t.heads + head) * L : nullptr;
  Vec hq[kRanks][U], hk[kRanks][U];
  mixed_sums<RQ, RK>(x, n, q1, k1, t.heads, hq, hk);
  for (int64_t m = 0; m < n; ++m) {
    Vec acc[U], gate[U];
    if (first) {
      gates(t, head + m, gate);
    }
#pragma GCC unroll 4
    for (int64_t u = 0; u < U; ++u) {
      acc[u] = first ? Vec::loadu(x + m * kKeys + u * V) * gate[u] : Vec::loadu(y + m * kKeys + u * V);
#pragma GCC unroll 4
      for (int64_t i = 0; i < RQ; ++i) {
        acc[u] = fmadd(hq[i][u], broadcast(q2 + i * t.heads + m), acc[u]);
      }
#pragma GCC unroll 4
      for (int64_t i = 0; i < RK; ++i) {
        acc[u] = fmadd(hk[i][u], Vec::loadu(k2 + (i * t.heads + m) * L + u * V), acc[u]);
      }
    }
    if (first && t.base) {
      const float* column = t.base + g * n * n + m;
      for (int64_t i = 0; i < n; ++i) {
        for (int64_t u = 0; u < U; ++u) {
          acc[u] = fmadd(Vec::loadu(x + i * kKeys + u * V), broadcast(column + i * n), acc[u]);
        }
      }
    }
    for (int64_t u = 0; u < U; ++u) {
      acc[u].store(y + m * kKeys + u * V);
    }
  }
}

// dx += the part that ranks r.. of one group make, and their gradients; the first step also makes identity, gates and base.
// dx may be dy where one step does all and there is no base.
template <int RQ, int RK>
void backward_step(
    const Tile& t, const TileGrads& d, int64_t g, int64_t r, bool first, const float* x, const float* dy, float* dx) {
  const int64_t n = t.heads / t.groups, head = g * n;
  const int64_t q1 = r * t.heads + head, q2 = (t.query_rank + r) * t.heads + head;
  const int64_t k1 = r * t.heads + head, k2 = (t.key_rank + r) * t.heads + head;
  Vec hq[kRanks][U], hk[kRanks][U], dhq[kRanks][U], dhk[kRanks][U];
  mixed_sums<RQ, RK>(x, n, t.query + q1, t.key + k1 * L, t.heads, hq, hk);
  mixed_sums<RQ, RK>(dy, n, t.query + q2, t.key + k2 * L, t.heads, dhq, dhk);
  for (int64_t i = 0; i < n; ++i) {
    Vec value[U], dvalue[U], acc[U];
    for (int64_t u = 0; u < U; ++u) {
      value[u] = Vec::loadu(x + i * kKeys + u * V);
      dvalue[u] = Vec::loadu(dy + i * kKeys + u * V);
    }
    if (first) {
      Vec gate[U], dgate(0.0f);
      gates(t, head + i, gate);
      float* dkey = t.key ? d.key + (2 * t.key_rank * t.heads + head + i) * L : nullptr;
      for (int64_t u = 0; u < U; ++u) {
        acc[u] = dvalue[u] * gate[u];
        const Vec product = value[u] * dvalue[u];
        dgate = dgate + product;
        if (dkey) {
          (Vec::loadu(dkey + u * V) + product).store(dkey + u * V);
        }
      }
      if (t.query) {
        float* dquery = d.query + (2 * t.query_rank * t.heads + head + i) * V;
        (Vec::loadu(dquery) + dgate).store(dquery);
      }
      if (t.base) {
        const float* row = t.base + (g * n + i) * n;
        float* drow = d.base + (g * n + i) * n * V;
        for (int64_t m = 0; m < n; ++m) {
          Vec sum = Vec::loadu(drow + m * V);
          for (int64_t u = 0; u < U; ++u) {
            const Vec other = Vec::loadu(dy + m * kKeys + u * V);
            acc[u] = fmadd(other, broadcast(row + m), acc[u]);
            sum = fmadd(value[u], other, sum);
          }
          sum.store(drow + m * V);
        }
      }
    } else {
      for (int64_t u = 0; u < U; ++u) {
        acc[u] = Vec::loadu(dx + i * kKeys + u * V);
      }
    }
#pragma GCC unroll 4
    for (int64_t j = 0; j < RQ; ++j) {
      float* dq1 = d.query + (q1 + j * t.heads + i) * V;
      float* dq2 = d.query + (q2 + j * t.heads + i) * V;
      const Vec w = broadcast(t.query + q1 + j * t.heads + i);
      Vec sum1 = Vec::loadu(dq1), sum2 = Vec::loadu(dq2);
#pragma GCC unroll 4
      for (int64_t u = 0; u < U; ++u) {
        acc[u] = fmadd(dhq[j][u], w, acc[u]);
        sum1 = fmadd(dhq[j][u], value[u], sum1);
        sum2 = fmadd(hq[j][u], dvalue[u], sum2);
      }
      sum1.store(dq1);
      sum2.store(dq2);
    }
#pragma GCC unroll 4
    for (int64_t j = 0; j < RK; ++j) {
#pragma GCC unroll 4
      for (int64_t u = 0; u < U; ++u) {
        float* dk1 = d.key + (k1 + j * t.heads + i) * L + u * V;
        float* dk2 = d.key + (k2 + j * t.heads + i) * L + u * V;
        acc[u] = fmadd(dhk[j][u], Vec::loadu(t.key + (k1 + j * t.heads + i) * L + u * V), acc[u]);
        fmadd(dhk[j][u], value[u], Vec::loadu(dk1)).store(dk1);
        fmadd(hk[j][u], dvalue[u], Vec::loadu(dk2)).store(dk2);
      }
    }
    for (int64_t u = 0; u < U; ++u) {
      acc[u].store(dx + i * kKeys + u * V);
    }
  }
}

// Calls step(rank of this step in the query-wise part, in the key-wise part, first rank, whether first) until all ranks are done.
template <typename Step>
inline void for_rank_steps(const Tile& t, const Step& step) {
  const int64_t rq = t.query ? t.query_rank : 0, rk = t.key ? t.key_rank : 0;
  int64_t r = 0;
  do {
    step(std::clamp<int64_t>(rq - r, 0, kRanks), std::clamp<int64_t>(rk - r, 0, kRanks), r, r == 0);
    r += kRanks;
  } while (r < std::max(rq, rk));
}

// Whether the result may be written over the input.
inline bool in_place(const Tile& t) {
  return !t.base && (t.query ? t.query_rank : 0) <= kRanks && (t.key ? t.key_rank : 0) <= kRanks;
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
  using Function = void (*)(const Tile&, int64_t, int64_t, bool, const float*, float*);
  constexpr Function steps[3][3] = {
      {forward_step<0, 0>, forward_step<0, 1>, forward_step<0, 2>},
      {forward_step<1, 0>, forward_step<1, 1>, forward_step<1, 2>},
      {forward_step<2, 0>, forward_step<2, 1>, forward_step<2, 2>}};
  if (x == y && !in_place(t)) {
    copy_tile(t.heads, x, spare);
    x = spare;
  }
  const int64_t group = t.heads / t.groups * kKeys;
  for_rank_steps(t, [&](int64_t rq, int64_t rk, int64_t r, bool first) {
    for (int64_t g = 0; g < t.groups; ++g) {
      steps[rq][rk](t, g, r, first, x + g * group, y + g * group);
    }
  });
}

// dy of y = Compose(x) becomes dx; adds the gradients of the composition to d.
inline void backward(const Tile& t, const TileGrads& d, const float* x, float* dy, float* spare) {
  using Function = void (*)(const Tile&, const TileGrads&, int64_t, int64_t, bool, const float*, const float*, float*);
  constexpr Function steps[3][3] = {
      {backward_step<0, 0>, backward_step<0, 1>, backward_step<0, 2>},
      {backward_step<1, 0>, backward_step<1, 1>, backward_step<1, 2>},
      {backward_step<2, 0>, backward_step<2, 1>, backward_step<2, 2>}};
  const float* from = dy;
  if (!in_place(t)) {
    copy_tile(t.heads, dy, spare);
    from = spare;
  }
  const int64_t group = t.heads / t.groups * kKeys;
  for_rank_steps(t, [&](int64_t rq, int64_t rk, int64_t r, bool first) {
    for (int64_t g = 0; g < t.groups; ++g) {
      steps[rq][rk](t, d, g, r, first, x + g * group, from + g * group, dy + g * group);
    }
  });
}

}  // namespace dcformer
