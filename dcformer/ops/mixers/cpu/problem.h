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

#ifdef __linux__
#include <sys/mman.h>
#endif

#include <array>
#include <cmath>
#include <limits>
#include <new>
#include <numeric>
#include <vector>

namespace dcformer {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr int64_t kTiles = kKeys / L;
static_assert(kTiles * L == kKeys, "a chunk is whole tiles");

// Uninitialised floats on a boundary of cache lines; large ones in large pages where the system has them, since a row's heads
// and keys lie on many pages.
class Buffer {
 public:
  explicit Buffer(int64_t size) : align_(size * sizeof(float) < 2 * kPageBytes ? kLine : kPage) {
    data_ = static_cast<float*>(::operator new(size * sizeof(float), align_));
#ifdef MADV_HUGEPAGE
    if (align_ == kPage) {
      madvise(data_, size * sizeof(float), MADV_HUGEPAGE);
    }
#endif
  }
  Buffer(const Buffer&) = delete;
  ~Buffer() {
    ::operator delete(data_, align_);
  }
  operator float*() const {
    return data_;
  }

 private:
  static constexpr std::size_t kPageBytes = 1 << 21;
  static constexpr std::align_val_t kLine{64}, kPage{kPageBytes};
  std::align_val_t align_;
  float* data_;
};

// The dtypes of tensors; products and all that lies between are in float32.
enum class Type { kFloat, kBFloat16, kHalf };

// A tensor [B, heads, rows, D] of any of them whose rows are contiguous; `batch`, `head`, `row` count elements.
struct Heads {
  char* data;
  Type type;
  int64_t batch, head, row;

  // Calls visit(pointer to row i) with the pointer's own type.
  template <typename Visit>
  void visit(int64_t b, int64_t n, int64_t i, const Visit& visit) const {
    const int64_t at = b * batch + n * head + i * row;
    switch (type) {
      case Type::kFloat:
        return visit(reinterpret_cast<float*>(data) + at);
      case Type::kBFloat16:
        return visit(reinterpret_cast<c10::BFloat16*>(data) + at);
      case Type::kHalf:
        return visit(reinterpret_cast<c10::Half*>(data) + at);
    }
  }
  // Rows i.. i + count to floats [count, width], zeros from D on.
  void read(int64_t b, int64_t n, int64_t i, int64_t count, int64_t D, int64_t width, float* to) const {
    visit(b, n, i, [&](const auto* from) {
      for (int64_t c = 0; c < count; ++c) {
        at::vec::convert(from + c * row, to + c * width, D);
        std::fill(to + c * width + D, to + (c + 1) * width, 0.0f);
      }
    });
  }
  // Asks for rows i.. i + count, which will be read soon.
  void prefetch(int64_t b, int64_t n, int64_t i, int64_t count, int64_t D) const {
    visit(b, n, i, [&](const auto* from) {
      for (int64_t c = 0; c < count; ++c) {
        for (int64_t d = 0; d < D; d += 64 / sizeof(*from)) {
          __builtin_prefetch(from + c * row + d, 0, 2);
        }
      }
    });
  }
};

// A Composition: base [G, n, n], query [B, T, 2 query_rank + 1, N], key packed. A missing part is a null pointer of rank 0.
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
  Heads query, key, value;
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
  int64_t shared() const {  // query heads that share a key head
    return N / K;
  }
  // From query to query of a chunk: a little more than the scores, or the rows of a product would share a few sets of the cache.
  int64_t row_floats() const {
    return N * kKeys + 2 * V;
  }
  int64_t padded_heads() const {  // room for a number a head in whole vectors
    return (N + V - 1) / V * V;
  }
};

// Head dims as products have them, in whole panels.
inline int64_t padded(int64_t D) {
  return (D + L - 1) / L * L;
}

// Where the gradients of a composition go, laid out as in Side.
struct SideGrads {
  float* base = nullptr;
  float* query = nullptr;
  float* key = nullptr;
};

// Where the gradient of a float mask goes. Broadcast dimensions have stride 0; where the keys are one, every task has a copy, that
// many floats apart.
struct MaskGrad {
  float* data = nullptr;
  std::array<int64_t, 4> stride{};
  int64_t copy = 0;
};

// Gradients: query [B, N, T, D], key [B, K, S, padded D], value [B, K, S, padded Dv]. All hold zeros before, since keys are added to and
// queries that see nothing are not written.
struct Grads {
  Heads query;
  float *key, *value;
  SideGrads pre, post;
  MaskGrad mask;
};

// The forward pass: out [B, N, T, Dv], statistics [B, N, T, 2] (largest score and sum; 0 and 1 where a row sees no key). They hold zeros
// and (0, 1) before.
void forward(const Problem& p, const Heads& out, float* statistics);

// The backward pass, from the output's gradient.
void backward(const Problem& p, const Heads& grad_out, const float* statistics, const Grads& grads);

// Key-wise weights are packed in tiles [2R+1, N, L], zero past the last key: floats of one tile, and of one row of the batch.
inline int64_t tile_floats(int64_t N, int64_t rank) {
  return (2 * rank + 1) * N * L;
}
inline int64_t packed_floats(int64_t S, int64_t N, int64_t rank) {
  return (S + kKeys - 1) / kKeys * kTiles * tile_floats(N, rank);
}

// Key-wise weights as they come, [B, S, rows = 2R+1, N] with any strides.
struct KeyWeights {
  float* data;
  int64_t B, S, rows, N;
  std::array<int64_t, 4> stride;
};

// Between that and tiles; unpack takes it to be contiguous.
void pack(const KeyWeights& from, float* to);
void unpack(const float* from, const KeyWeights& to);

// Queries t0.. t0 + queries of rows b0.. of the batch, and the chunks of keys that any of them sees.
struct Block {
  int64_t b0, batch, t0, queries, chunk0, chunks;
};

// The blocks of a problem, and how the keys of each are split so that every thread has work.
class Plan {
 public:
  // `buffers`: chunks of floats that a block keeps. `one_row`: blocks of one row of the batch.
  Plan(const Problem& p, int64_t buffers, bool one_row = false) {
    // A chunk of scores fits the second-level cache, backward with its few companions. Blocks of long rows leave the last level, but
    // packing for few queries would cost more.
    const int64_t chunk_floats = buffers == 1 ? 1 << 17 : 1 << 16, block_floats = buffers == 1 ? 1 << 23 : 3 << 24;
    constexpr int64_t kTogetherFloats = 1 << 21;
    const int64_t seen = p.window && p.window < p.S ? std::min(p.S, (p.causal ? 1 : 2) * p.window + 2 * kKeys) : p.S;
    const int64_t most = std::min(chunk_floats / (p.N * kKeys), block_floats / (buffers * p.N * (seen + kKeys)));
    const int64_t blocks_at_least = (p.T - 1) / std::clamp<int64_t>(most, 16, 128) + 1;
    const int64_t even = (p.T - 1) / std::max<int64_t>(1, blocks_at_least) + 1;
    queries = std::min(p.T, (even - 1) / kPanelRows * kPanelRows + kPanelRows);
    for (int64_t t = 0; t < p.T; t += queries) {
      const int64_t count = std::min(queries, p.T - t), first = p.first(t), last = p.last(t + count - 1);
      if (last <= first) {
        continue;
      }
      const int64_t chunk0 = first / kKeys, chunks = (last - 1) / kKeys + 1 - chunk0;
      const int64_t fit = kTogetherFloats / (buffers * p.N * count * chunks * kKeys);
      const int64_t together = one_row ? 1 : std::max<int64_t>(1, std::min({fit, p.B, 4 * threads}));
      for (int64_t b = 0; b < p.B; b += together) {
        blocks.push_back({b, std::min(together, p.B - b), t, count, chunk0, chunks});
        rows = std::max(rows, blocks.back().batch * count * chunks);
        tasks = std::max(tasks, blocks.back().batch * splits(blocks.back()));
      }
    }
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

// A range of a block's queries, or of a chunk's keys.
struct Span {
  int64_t begin, end;

  int64_t size() const {
    return end - begin;
  }
};

// The queries of a block of which any sees keys.begin.. keys.end of a chunk.
inline Span queries_seeing(const Problem& p, const Block& block, int64_t chunk, const Span& keys) {
  Span queries{0, block.queries};
  while (queries.size() && p.last(block.t0 + queries.begin) <= chunk * kKeys + keys.begin) {
    ++queries.begin;
  }
  while (queries.size() && p.first(block.t0 + queries.end - 1) >= chunk * kKeys + keys.end) {
    --queries.end;
  }
  return queries;
}

inline Tile tile(const Problem& p, const Side& side, const Row& row, int64_t t) {
  const int64_t query = (row.b * p.T + row.i) * (2 * side.query_rank + 1) * p.N;
  const int64_t key = row.b * packed_floats(p.S, p.N, side.key_rank) + (row.chunk * kTiles + t) * tile_floats(p.N, side.key_rank);
  return {p.N, side.groups, side.base, side.query ? side.query + query : nullptr, side.query_rank,
          side.key ? side.key + key : nullptr, side.key_rank};
}

// y = Compose(x) for the rows of a chunk where they are seen. Tile by tile, so that the tile's key-wise weights stay in the first-level
// cache while the queries pass.
inline void compose(
    const Problem& p, const Side& side, const Block& block, const Task& task, int64_t chunk, const float* x, float* y, float* spare) {
  for (int64_t t = 0; t < kTiles; ++t) {
    for (int64_t c = 0; c < block.queries; ++c) {
      const Row row(p, task.b, block.t0 + c, chunk);
      if (row.tile_begin() <= t && t < row.tile_end()) {
        forward(tile(p, side, row, t), x + c * p.row_floats() + t * L, y + c * p.row_floats() + t * L, spare);
      }
    }
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
  if (row.lo == 0 && row.hi == kKeys && !p.mask.visible && !p.mask.added) {
    return;
  }
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

// For all heads, products of the block's rows with the tiles of a chunk that they see: out[c, n, j] = alpha a[n, c] . keys[j]. Keys
// past the last give zeros. a is [N, C, padded D]; rows and panels hold a padded row a key.
inline void products(
    const Problem& p, const Block& block, const Task& task, int64_t chunk, float alpha, const float* a, const Heads& keys, int64_t D,
    float* rows, float* panels, float* out) {
  const int64_t j = chunk * kKeys, count = std::min(kKeys, p.S - j), width = padded(D);
  std::array<Span, kTiles> seeing;
  for (int64_t t = 0; t < kTiles; ++t) {
    seeing[t] = queries_seeing(p, block, chunk, {t * L, (t + 1) * L});
  }
  for (int64_t k = 0; k < p.K; ++k) {
    keys.read(task.b, k, j, count, D, width, rows);
    if (k + 1 < p.K) {
      keys.prefetch(task.b, k + 1, j, count, D);
    }
    std::fill(rows + count * width, rows + kKeys * width, 0.0f);
    const bool few = block.queries * p.shared() <= kDotRows;
    for (int64_t t = 0; t < kTiles && !few; ++t) {
      transpose_panel(width, rows + t * L * width, width, panels + t * width * L);
    }
    for (int64_t n = k * p.shared(); n < (k + 1) * p.shared(); ++n) {
      for (int64_t t = 0; t < kTiles; ++t) {
        const Span& c = seeing[t];
        const float* const from = a + (n * block.queries + c.begin) * width;
        float* const to = out + c.begin * p.row_floats() + n * kKeys + t * L;
        if (few) {
          for (int64_t i = 0; i < c.size(); ++i) {
            dot_products(width, alpha, from + i * width, rows + t * L * width, width, to + i * p.row_floats());
          }
        } else {
          multiply(c.size(), L, D, alpha, {from, width, 1}, {panels + t * width * L, L, 0}, false, to, p.row_floats());
        }
      }
    }
  }
}

// For all heads, the weighted sum of a chunk of keys: out[n, c] = (or +=) alpha sum_j x[c, n, j] keys[j], [N, C, padded D].
inline void weighted_sums(
    const Problem& p, const Block& block, const Task& task, int64_t chunk, float alpha, const float* x, const Heads& keys, int64_t D,
    float* rows, bool accumulate, float* out) {
  const int64_t j = chunk * kKeys, count = std::min(kKeys, p.S - j), width = padded(D);
  for (int64_t k = 0; k < p.K; ++k) {
    keys.read(task.b, k, j, count, D, width, rows);
    if (k + 1 < p.K) {
      keys.prefetch(task.b, k + 1, j, count, D);
    }
    for (int64_t n = k * p.shared(); n < (k + 1) * p.shared(); ++n) {
      for (int64_t c = 0; c < block.queries; c += kPanelRows) {  // no further than any of these rows sees
        const int64_t queries = std::min(kPanelRows, block.queries - c);
        const int64_t lo = Row(p, task.b, block.t0 + c, chunk).lo, hi = Row(p, task.b, block.t0 + c + queries - 1, chunk).hi;
        if (lo < hi || !accumulate) {
          multiply(queries, width, hi - lo, alpha, {x + c * p.row_floats() + n * kKeys + lo, p.row_floats(), 1},
                   {rows + lo * width, width, L}, accumulate, out + (n * block.queries + c) * width, width);
        }
      }
    }
  }
}

// The rows of a block as the sum of what its tasks have made of them, parts [task, N, C, padded D].
inline void add_parts(const Problem& p, const Plan& plan, const Block& block, const float* parts, int64_t D, const Heads& out) {
  const int64_t C = block.queries, splits = plan.splits(block), width = padded(D);
  at::parallel_for(0, block.batch * p.N * C, 64, [&](int64_t begin, int64_t end) {
    std::vector<float> sum(width);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t r = i / (p.N * C), n = i / C % p.N, c = i % C;
      std::fill(sum.begin(), sum.end(), 0.0f);
      for (int64_t split = 0; split < splits; ++split) {
        const float* const from = parts + (((r * splits + split) * p.N + n) * C + c) * width;
        for (int64_t d = 0; d < D; ++d) {
          sum[d] += from[d];
        }
      }
      out.visit(block.b0 + r, n, block.t0 + c, [&](auto* to) { at::vec::convert(sum.data(), to, D); });
    }
  });
}

// Takes arrays of floats out of one piece of memory, each on a boundary of cache lines.
class Arrays {
 public:
  explicit Arrays(float* memory) : memory_(memory) {}  // nothing, to count only
  float* take(int64_t size) {
    float* const array = memory_ ? memory_ + taken_ : nullptr;
    taken_ += (size + 15) / 16 * 16;
    return array;
  }
  int64_t taken() const {
    return taken_;
  }

 private:
  float* memory_;
  int64_t taken_ = 0;
};

}  // namespace dcformer
