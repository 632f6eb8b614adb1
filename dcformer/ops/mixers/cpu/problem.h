// One call of the operator in plain pointers, and what forward and backward share: the blocks and chunks they walk over, rows of
// scores, products.
//
// A block is some queries of some rows of the batch. Its scores are made and mixed in chunks of kKeys keys, small enough for the
// second-level cache; a chunk is [C, N, kKeys] (rows padded), so that all heads of a query lie side by side.
//
// B batch, T queries, S keys, N heads, K key/value heads, D head dim, C queries of a block, R rank, G groups; V, L as in compose.h.

#pragma once

#include "compose.h"

#include <ATen/Parallel.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <array>
#include <cmath>
#include <limits>
#include <new>
#include <numeric>
#include <vector>

extern "C" {
void sgemm_(
    const char*, const char*, const int*, const int*, const int*, const float*, const float*, const int*, const float*, const int*,
    const float*, float*, const int*);
// Of MKL alone: half-precision factors, float32 products.
[[gnu::weak]] void gemm_bf16bf16f32_(
    const char*, const char*, const int*, const int*, const int*, const float*, const c10::BFloat16*, const int*,
    const c10::BFloat16*, const int*, const float*, float*, const int*);
[[gnu::weak]] void gemm_f16f16f32_(
    const char*, const char*, const int*, const int*, const int*, const float*, const c10::Half*, const int*, const c10::Half*,
    const int*, const float*, float*, const int*);
}

namespace dcformer {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr int64_t kTiles = kKeys / L;
static_assert(kTiles * L == kKeys, "a chunk is whole tiles");

// Uninitialised floats on a boundary of cache lines.
class Buffer {
 public:
  explicit Buffer(int64_t size) : data_(static_cast<float*>(::operator new(size * sizeof(float), kAlign))) {}
  Buffer(const Buffer&) = delete;
  ~Buffer() {
    ::operator delete(data_, kAlign);
  }
  operator float*() const {
    return data_;
  }

 private:
  static constexpr std::align_val_t kAlign{64};
  float* data_;
};

// The dtypes of factors; products are in float32 always.
enum class Factor { kFloat, kBFloat16, kHalf };

inline int64_t size_of(Factor type) {
  return type == Factor::kFloat ? 4 : 2;
}

// Whether this BLAS multiplies factors of the type.
inline bool multiplies(Factor type) {
  return type == Factor::kFloat || (type == Factor::kBFloat16 ? gemm_bf16bf16f32_ != nullptr : gemm_f16f16f32_ != nullptr);
}

// One factor of a product: rows, `row` elements apart.
struct Matrix {
  const void* data;
  int64_t row;
  bool transposed = false;
};

// out[M, N] = alpha a b + beta out for a [M, K] and b [K, N], or their transposes.
inline void multiply(
    Factor type, int64_t M, int64_t N, int64_t K, float alpha, const Matrix& a, const Matrix& b, float beta, float* out,
    int64_t out_row) {
  const int m = M, n = N, k = K, lda = a.row, ldb = b.row, ldo = out_row;
  const auto call = [&](auto function, auto* example) {  // BLAS counts in columns: out^T = b^T a^T
    using T = const std::remove_pointer_t<decltype(example)>*;
    function(b.transposed ? "T" : "N", a.transposed ? "T" : "N", &n, &m, &k, &alpha, static_cast<T>(b.data), &ldb,
             static_cast<T>(a.data), &lda, &beta, out, &ldo);
  };
  switch (type) {
    case Factor::kFloat:
      return call(sgemm_, static_cast<float*>(nullptr));
    case Factor::kBFloat16:
      return call(gemm_bf16bf16f32_, static_cast<c10::BFloat16*>(nullptr));
    case Factor::kHalf:
      return call(gemm_f16f16f32_, static_cast<c10::Half*>(nullptr));
  }
}

// A tensor [B, heads, rows, D] in float32 whose rows are contiguous.
struct Heads {
  float* data;
  int64_t batch, head, row;

  float* at(int64_t b, int64_t n, int64_t i) const {
    return data + b * batch + n * head + i * row;
  }
};

// The same as factors of products, in the problem's type.
struct Factors {
  const char* data;
  int64_t size, batch, head, row;

  Matrix at(int64_t b, int64_t n, int64_t i, bool transposed = false) const {
    return {data + size * (b * batch + n * head + i * row), row, transposed};
  }
};

// A Composition: base [G, n, n], query [B, T, 2 query_rank + 1, N], key as `pack` leaves it. A missing part is a null pointer.
struct Side {
  const float* base = nullptr;
  const float* query = nullptr;
  const float* key = nullptr;
  int64_t query_rank = 0, key_rank = 0, groups = 1;

  bool empty() const {
    return !base && !query && !key;
  }
};

// A mask that broadcasts to [B, N, T, S]: bool (true = visible) or float (added), or neither. Broadcast dimensions have stride 0.
struct Mask {
  const bool* visible = nullptr;
  const float* added = nullptr;
  std::array<int64_t, 4> stride{};

  int64_t at(int64_t b, int64_t n, int64_t i, int64_t j) const {
    return b * stride[0] + n * stride[1] + i * stride[2] + j * stride[3];
  }
};

// Drops a share of the weights, the same ones whenever asked: a hash of seed and position (the finaliser of SplitMix64).
struct Dropout {
  double p = 0;
  uint64_t seed = 0;

  bool keeps(uint64_t position) const {
    uint64_t z = seed + position * 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return static_cast<double>((z ^ (z >> 31)) >> 32) >= p * 0x1p32;
  }
};

struct Problem {
  int64_t B, N, K, T, S, D, Dv;
  Factor type;  // of query, key, value and, backward, the output's gradient
  Factors query, key, value;
  Side pre, post;
  Mask mask;
  Dropout dropout;
  bool causal;
  int64_t window;  // 0: none
  float scale;

  // The keys that query i sees, [first, last): the queries are the last T of the S positions.
  int64_t first(int64_t i) const {
    return window ? std::clamp<int64_t>(i + S - T - window + 1, 0, S) : 0;
  }
  int64_t last(int64_t i) const {
    const int64_t past = causal ? 1 : window ? window : S + T;
    return std::clamp(i + S - T + past, first(i), S);
  }
  int64_t kv_head(int64_t n) const {
    return n * K / N;
  }
  // From query to query of a chunk: a little more than the scores, or the rows of a product would share a few sets of the cache.
  int64_t row_floats() const {
    return N * kKeys + 2 * V;
  }
  int64_t padded_heads() const {  // room for a number a head in whole vectors
    return (N + V - 1) / V * V;
  }
};

// Packed floats of the key-wise weights of one tile and of one row of the batch.
inline int64_t tile_floats(int64_t N, int64_t rank) {
  return (2 * rank + 1) * N * L;
}
inline int64_t packed_floats(int64_t S, int64_t N, int64_t rank) {
  return (S + kKeys - 1) / kKeys * kTiles * tile_floats(N, rank);
}

// Calls visit(offset of key j's weights, of the same in the packed ones) for all keys. Packed: tiles of [2R+1, N, L].
template <typename Visit>
void for_packed(int64_t B, int64_t S, int64_t N, int64_t rank, const Visit& visit) {
  at::parallel_for(0, B * S, 256, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t b = i / S, j = i % S;
      visit(b, j, b * packed_floats(S, N, rank) + j / L * tile_floats(N, rank) + j % L);
    }
  });
}

// Queries t0.. t0 + queries of rows b0.. of the batch, and the chunks of keys that any of them sees.
struct Block {
  int64_t b0, batch, t0, queries, chunk0, chunks;
};

// The blocks of a problem, and how the keys of each are split so that every thread has work.
class Plan {
 public:
  // `buffers`: chunks of floats that a block keeps. `one_row`: blocks of one row of the batch.
  Plan(const Problem& p, int64_t buffers, bool one_row = false) {
    // A chunk of scores fits the second-level cache with its few companions, a block the last level; products want many rows.
    constexpr int64_t kChunkFloats = 1 << 16, kBlockFloats = 1 << 23;
    const int64_t seen = p.window ? std::min(p.S, p.window + 2 * kKeys) : p.S;
    const int64_t most = std::min(kChunkFloats / (p.N * kKeys), kBlockFloats / (buffers * p.N * (seen + kKeys)));
    const int64_t queries = std::min(p.T, std::clamp<int64_t>(most, 16, 128));
    for (int64_t t = 0; t < p.T; t += queries) {
      const int64_t count = std::min(queries, p.T - t), first = p.first(t), last = p.last(t + count - 1);
      if (last <= first) {
        continue;
      }
      const int64_t chunk0 = first / kKeys, chunks = (last - 1) / kKeys + 1 - chunk0;
      const int64_t fit = kBlockFloats / 4 / (buffers * p.N * count * chunks * kKeys);
      const int64_t together = one_row ? 1 : std::clamp<int64_t>(fit, 1, p.B);
      for (int64_t b = 0; b < p.B; b += together) {
        blocks.push_back({b, std::min(together, p.B - b), t, count, chunk0, chunks});
        rows = std::max(rows, blocks.back().batch * count * chunks);
        tasks = std::max(tasks, blocks.back().batch * splits(blocks.back()));
      }
    }
    this->queries = queries;
  }
  // Into how many parts a block's keys are split: rows of the batch times parts is a multiple of the threads where it can be.
  int64_t splits(const Block& block) const {
    return std::min(block.chunks, threads / std::gcd(threads, block.batch));
  }

  std::vector<Block> blocks;
  int64_t threads = at::get_num_threads();
  int64_t queries = 0;  // of the largest block
  int64_t rows = 0;     // rows of a chunk, over all chunks of the largest block
  int64_t tasks = 0;    // rows of the batch times splits, at most
};

// What one task does of a block: the chunks [begin, end) (counted from the block's first) of one row of the batch.
struct Task {
  int64_t index, row, b, begin, end;
};

// Calls body(task) for all tasks of a block, in parallel; tasks of one row of the batch have neighbouring indices.
template <typename Body>
void for_tasks(const Plan& plan, const Block& block, const Body& body) {
  const int64_t splits = plan.splits(block);
  at::parallel_for(0, block.batch * splits, 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const int64_t row = i / splits, part = i % splits;
      body(Task{i, row, block.b0 + row, part * block.chunks / splits, (part + 1) * block.chunks / splits});
    }
  });
}

// One query at one chunk: which query, which keys it sees, [lo, hi) counted from the chunk's first.
struct Row {
  int64_t b, i, chunk, lo, hi;

  Row(const Problem& p, int64_t b, int64_t i, int64_t chunk) : b(b), i(i), chunk(chunk) {
    lo = std::clamp<int64_t>(p.first(i) - chunk * kKeys, 0, kKeys);
    hi = std::clamp<int64_t>(p.last(i) - chunk * kKeys, lo, kKeys);
  }
  bool empty() const {
    return lo == hi;
  }
  int64_t tile_begin() const {
    return lo / L;
  }
  int64_t tile_end() const {
    return (hi + L - 1) / L;
  }
};

inline Tile tile(const Problem& p, const Side& side, const Row& row, int64_t t) {
  const int64_t query = (row.b * p.T + row.i) * (2 * side.query_rank + 1) * p.N;
  const int64_t key = row.b * packed_floats(p.S, p.N, side.key_rank) + (row.chunk * kTiles + t) * tile_floats(p.N, side.key_rank);
  return {p.N, side.groups, side.base, side.query ? side.query + query : nullptr, side.query_rank,
          side.key ? side.key + key : nullptr, side.key_rank};
}

// y = Compose(x) of a row where it is seen.
inline void compose(const Problem& p, const Side& side, const Row& row, const float* x, float* y, float* spare) {
  for (int64_t t = row.tile_begin(); t < row.tile_end(); ++t) {
    forward(tile(p, side, row, t), x + t * L, y + t * L, spare);
  }
}

// Zeros where a row is not seen, for all heads.
inline void clear_unseen(const Problem& p, const Row& row, float* x) {
  if (row.lo == 0 && row.hi == kKeys) {
    return;
  }
  for (int64_t n = 0; n < p.N; ++n) {
    std::fill(x + n * kKeys, x + n * kKeys + row.lo, 0.0f);
    std::fill(x + n * kKeys + row.hi, x + (n + 1) * kKeys, 0.0f);
  }
}

// The mask on one head of a row, and -inf around what is seen, as far as its tiles reach.
inline void apply_mask(const Problem& p, const Row& row, int64_t n, float* x) {
  std::fill(x + row.tile_begin() * L, x + row.lo, -kInf);
  std::fill(x + row.hi, x + row.tile_end() * L, -kInf);
  const int64_t at = p.mask.at(row.b, n, row.i, row.chunk * kKeys), step = p.mask.stride[3];
  if (p.mask.visible) {
    for (int64_t j = row.lo; j < row.hi; ++j) {
      x[j] = p.mask.visible[at + j * step] ? x[j] : -kInf;
    }
  } else if (p.mask.added) {
    for (int64_t j = row.lo; j < row.hi; ++j) {
      x[j] += p.mask.added[at + j * step];
    }
  }
}

// Dropout of a row of weights or of their gradients.
inline void drop(const Problem& p, const Row& row, float* x) {
  if (p.dropout.p == 0) {
    return;
  }
  const float factor = p.dropout.p < 1 ? 1 / (1 - p.dropout.p) : 0;
  for (int64_t n = 0; n < p.N; ++n) {
    const uint64_t position = (((row.b * p.N + n) * p.T + row.i) * p.S) + row.chunk * kKeys;
    for (int64_t j = row.lo; j < row.hi; ++j) {
      x[n * kKeys + j] = p.dropout.keeps(position + j) ? x[n * kKeys + j] * factor : 0;
    }
  }
}

// For all heads, a chunk of products of two rows: chunk[c, n, j] = alpha a[c] . b[j]. Keys past the last are zero.
inline void products(
    const Problem& p, const Block& block, int64_t b, int64_t chunk, float alpha, const Factors& a, const Factors& keys, int64_t D,
    float* out) {
  const int64_t j = chunk * kKeys, count = std::min(kKeys, p.S - j);
  for (int64_t n = 0; n < p.N; ++n) {
    multiply(p.type, block.queries, count, D, alpha, a.at(b, n, block.t0), keys.at(b, p.kv_head(n), j, true), 0, out + n * kKeys,
             p.row_floats());
    for (int64_t c = 0; c < block.queries && count < kKeys; ++c) {
      float* const row = out + c * p.row_floats() + n * kKeys;
      std::fill(row + count, row + kKeys, 0.0f);
    }
  }
}

// A chunk as factors: itself, or narrowed into `spare`.
class ChunkFactors {
 public:
  ChunkFactors(const Problem& p, int64_t queries, const float* x, float* spare) : size_(size_of(p.type)), row_(p.row_floats()) {
    data_ = reinterpret_cast<const char*>(p.type == Factor::kFloat ? x : spare);
    if (p.type == Factor::kBFloat16) {
      narrow(x, queries * row_, reinterpret_cast<c10::BFloat16*>(spare));
    } else if (p.type == Factor::kHalf) {
      narrow(x, queries * row_, reinterpret_cast<c10::Half*>(spare));
    }
  }
  Matrix head(int64_t n, bool transposed = false) const {
    return {data_ + size_ * n * kKeys, row_, transposed};
  }

 private:
  template <typename T>
  static void narrow(const float* x, int64_t count, T* to) {
    for (int64_t i = 0; i < count; i += 2 * V) {
      at::vec::convert_from_float<T>(Vec::loadu(x + i), Vec::loadu(x + i + V)).store(to + i);
    }
  }

  const char* data_;
  int64_t size_, row_;
};

// Rows of a block as the sum of what its tasks have made of them, parts [task, N, C, D]; nothing to do where there is one a row.
inline void add_parts(
    const Problem& p, const Block& block, int64_t splits, const float* parts, int64_t D, const Heads& out) {
  const int64_t C = block.queries;
  if (splits == 1) {
    return;
  }
  at::parallel_for(0, block.batch * p.N * C, 64, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t r = i / (p.N * C), n = i / C % p.N, c = i % C;
      float* const to = out.at(block.b0 + r, n, block.t0 + c);
      for (int64_t split = 0; split < splits; ++split) {
        const float* const from = parts + (((r * splits + split) * p.N + n) * C + c) * D;
        for (int64_t d = 0; d < D; ++d) {
          to[d] = split ? to[d] + from[d] : from[d];
        }
      }
    }
  });
}

}  // namespace dcformer
