// Products of small matrices in float32, with vectors along the columns of the second factor. A BLAS copies both factors anew in each
// call, which is dear at these sizes; here a chunk of keys is packed once for all queries of a block.
//
// V lanes of a vector, L = 2 V columns of a panel.

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

// The first factor: element (m, k) at data[m * row + k * step].
struct Left {
  const float* data;
  int64_t row, step;
};

// The second factor: panels of L columns, each [K, L] with rows `row` floats apart; `panel` floats from panel to panel.
struct Right {
  const float* data;
  int64_t row, panel;
};

// out[i, :L] = alpha sum_k a(i, k) b[k, :L], for M rows; added to what is there where `accumulate`.
template <int M>
inline void multiply_panel(
    int64_t K, float alpha, const Left& a, const float* b, int64_t b_row, bool accumulate, float* out, int64_t out_row) {
  Vec sum[M][U];
#pragma GCC unroll 8
  for (int i = 0; i < M; ++i) {
    sum[i][0] = sum[i][1] = Vec(0.0f);
    __builtin_prefetch(out + i * out_row, 1);  // there in time for the stores
  }
  for (int64_t k = 0; k < K; ++k) {
    const Vec b0 = Vec::loadu(b + k * b_row), b1 = Vec::loadu(b + k * b_row + V);
    const float* const column = a.data + k * a.step;
#pragma GCC unroll 8
    for (int i = 0; i < M; ++i) {
      const Vec factor(column[i * a.row]);
      sum[i][0] = fmadd(factor, b0, sum[i][0]);
      sum[i][1] = fmadd(factor, b1, sum[i][1]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < M; ++i) {
#pragma GCC unroll 2
    for (int u = 0; u < U; ++u) {
      float* const to = out + i * out_row + u * V;
      const Vec product = sum[i][u] * Vec(alpha);
      (accumulate ? Vec::loadu(to) + product : product).store(to);
    }
  }
}

constexpr int64_t kDotRows = 2;    // as many rows and fewer are multiplied without a panel
constexpr int64_t kPanelRows = 6;  // times U sums and a few more are what 16 registers hold

// out[M, N] = alpha a b, or added to it where `accumulate`. N is a multiple of L.
inline void multiply(
    int64_t M, int64_t N, int64_t K, float alpha, const Left& a, const Right& b, bool accumulate, float* out, int64_t out_row) {
  using Function = void (*)(int64_t, float, const Left&, const float*, int64_t, bool, float*, int64_t);
  constexpr Function functions[kPanelRows] = {multiply_panel<1>, multiply_panel<2>, multiply_panel<3>,
                                         multiply_panel<4>, multiply_panel<5>, multiply_panel<6>};
  for (int64_t n = 0; n < N; n += L) {
    for (int64_t m = 0; m < M; m += kPanelRows) {
      functions[std::min(kPanelRows, M - m) - 1](
          K, alpha, {a.data + m * a.row, a.row, a.step}, b.data + n / L * b.panel, b.row, accumulate, out + m * out_row + n, out_row);
    }
  }
}

// The transpose of x [L, K] as a panel [K, L]. K is a multiple of V.
inline void transpose_panel(int64_t K, const float* x, int64_t row, float* panel) {
  for (int64_t l = 0; l < L; l += V) {
    for (int64_t k = 0; k < K; k += V) {
      at::vec::transpose_mxn<float, V, V>(x + l * row + k, row, panel + k * L + l, L);
    }
  }
}

// out[j] = alpha a . x[j] for the L rows of x [L, K], without a panel: cheaper for one or two rows of a. K is a multiple of V.
inline void dot_products(int64_t K, float alpha, const float* a, const float* x, int64_t row, float* out) {
  for (int64_t l = 0; l < L; l += V) {
    Vec sum[V];
    std::fill_n(sum, V, Vec(0.0f));
    for (int64_t k = 0; k < K; k += V) {
      const Vec factor = Vec::loadu(a + k);
#pragma GCC unroll 16
      for (int64_t i = 0; i < V; ++i) {
        sum[i] = fmadd(factor, Vec::loadu(x + (l + i) * row + k), sum[i]);
      }
    }
    float lanes[V * V], columns[V * V];
#pragma GCC unroll 16
    for (int64_t i = 0; i < V; ++i) {
      sum[i].store(lanes + i * V);
    }
    at::vec::transpose_mxn<float, V, V>(lanes, V, columns, V);
    Vec total(0.0f);
    for (int64_t i = 0; i < V; ++i) {
      total = total + Vec::loadu(columns + i * V);
    }
    (total * Vec(alpha)).store(out + l);
  }
}

}  // namespace dcformer
