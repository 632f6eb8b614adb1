// The CPU mixer: a block of scores [B, N, C, S] to weights and back, in place, in float32. See README.md of dcformer/ops.
//
// Forward is three sweeps: compose (tiles of keys, rows of the tile inside, so that key-wise weights stay in L1), softmax (row by
// row), compose. Backward makes the softmax again from the row statistics and runs the same sweeps back. A sweep is split over
// threads so that none of them adds to the same place; sums over keys are kept a thread and added up in a fixed order.
//
// B batch, N heads, C queries of the block, S keys, R rank, G groups, n = N/G; V, U, L as in compose.h.

#include "compose.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <limits>
#include <optional>
#include <vector>

namespace dcformer {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr int64_t kPackedFloats = 4096;  // packed key-wise weights that leave room for the rest of L1
constexpr int64_t kRows = 32;            // queries that share packed weights in the forward sweep
using MaybeTensor = std::optional<at::Tensor>;

struct Shape {
  int64_t B, N, C, S, row;  // row: floats from one row to the next
  std::optional<int64_t> lower, upper;

  Shape(const at::Tensor& block, std::optional<int64_t> lower, std::optional<int64_t> upper)
      : B(block.size(0)), N(block.size(1)), C(block.size(2)), S(block.size(3)), row(block.stride(2)), lower(lower), upper(upper) {}

  int64_t first(int64_t c) const {
    return lower ? std::clamp<int64_t>(c + *lower, 0, S) : 0;
  }
  int64_t last(int64_t c) const {  // exclusive
    return upper ? std::clamp<int64_t>(c + *upper, first(c), S) : S;
  }
  int64_t head_stride() const {
    return C * row;
  }
  int64_t at(int64_t b, int64_t c, int64_t j) const {  // head 0
    return (b * N * C + c) * row + j;
  }
};

// A Composition: query [B, C, 2R+1, N] with contiguous rows, key [B, S, 2R+1, N] with stride 1 along S, base contiguous.
struct Part {
  MaybeTensor base, query, key;
  int64_t heads, groups;

  bool empty() const {
    return !base && !query && !key;
  }
  int64_t query_rows() const {
    return query ? query->size(2) : 0;
  }
  int64_t key_rows() const {
    return key ? key->size(2) : 0;
  }
  int64_t packed_floats() const {
    return key_rows() * heads * L;
  }
  int64_t tiles_together() const {
    return key ? std::clamp<int64_t>(kPackedFloats / packed_floats(), 1, 8) : 8;
  }

  Tile tile(int64_t b, int64_t c, const float* packed) const {
    return {heads, groups, base ? base->const_data_ptr<float>() : nullptr,
            query ? query->const_data_ptr<float>() + b * query->stride(0) + c * query->stride(1) : nullptr, query_rows() / 2,
            key ? packed : nullptr, key_rows() / 2};
  }

  // Calls visit(pointer into the key-wise weights, packed row) for all rows of the tile at key j.
  template <typename Visit>
  void for_key_rows(int64_t b, int64_t j, float* packed, const Visit& visit) const {
    for (int64_t row = 0; row < key_rows(); ++row) {
      for (int64_t n = 0; n < heads; ++n) {
        const int64_t from = b * key->stride(0) + j * key->stride(1) + row * key->stride(2) + n * key->stride(3);
        visit(from, packed + (row * heads + n) * L);
      }
    }
  }
  void pack(int64_t b, int64_t j, int64_t count, float* packed) const {
    if (!key) {
      return;
    }
    const float* data = key->const_data_ptr<float>();
    for_key_rows(b, j, packed, [&](int64_t from, float* to) {
      for (int64_t u = 0; u < U; ++u) {
        const int64_t left = std::clamp<int64_t>(count - u * V, 0, V);
        (left ? Vec::loadu(data + from + u * V, left) : Vec(0.0f)).store(to + u * V);
      }
    });
  }
  void add_packed(int64_t b, int64_t j, int64_t count, float* packed) const {
    if (!key) {
      return;
    }
    float* data = key->data_ptr<float>();
    for_key_rows(b, j, packed, [&](int64_t to, const float* from) {
      for (int64_t l = 0; l < count; ++l) {
        data[to + l] += from[l];
      }
    });
  }
};

// A tile of all heads from a block to [N, L] in L1. Keys past the end are zeros. Asks for the same keys of the next query, which no
// hardware foresees.
inline void load_tile(const Shape& s, const float* block, int64_t count, float* tile) {
  for (int64_t n = 0; n < s.N; ++n) {
    const float* from = block + n * s.head_stride();
    __builtin_prefetch(from + s.row);
    if (count == L) {
      for (int64_t u = 0; u < U; ++u) {
        Vec::loadu(from + u * V).store(tile + n * L + u * V);
      }
    } else {
      std::copy_n(from, count, tile + n * L);
      std::fill_n(tile + n * L + count, L - count, 0.0f);
    }
  }
}

void store_tile(const float* tile, int64_t heads, int64_t stride, int64_t count, float* block) {
  for (int64_t n = 0; n < heads; ++n) {
    if (count == L) {
      for (int64_t u = 0; u < U; ++u) {
        Vec::loadu(tile + n * L + u * V).store(block + n * stride + u * V);
      }
    } else {
      std::copy_n(tile + n * L, count, block + n * stride);
    }
  }
}

void zero_tile(int64_t heads, int64_t stride, int64_t count, float* block) {
  for (int64_t n = 0; n < heads; ++n) {
    std::fill_n(block + n * stride, count, 0.0f);
  }
}

// to = Compose(from) for what each row sees; the rest of `to` becomes zero unless it is `from`.
void compose_block(const Shape& s, const Part& part, const float* from, float* to) {
  const int64_t together = part.tiles_together();
  const int64_t span = together * L;
  const int64_t row_chunks = (s.C + kRows - 1) / kRows, key_chunks = (s.S + span - 1) / span;
  at::parallel_for(0, s.B * row_chunks * key_chunks, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> packed(together * part.packed_floats()), x(s.N * L), y(s.N * L);
    for (int64_t task = begin; task < end; ++task) {
      const int64_t b = task / (row_chunks * key_chunks), chunk = task % (row_chunks * key_chunks);
      const int64_t c0 = chunk / key_chunks * kRows, c1 = std::min(s.C, c0 + kRows), j0 = chunk % key_chunks * span;
      const int64_t tiles = (std::min(span, s.S - j0) + L - 1) / L;
      if (j0 < s.last(c1 - 1) && j0 + span > s.first(c0)) {
        for (int64_t t = 0; t < tiles; ++t) {
          part.pack(b, j0 + t * L, s.S - j0 - t * L, packed.data() + t * part.packed_floats());
        }
      }
      for (int64_t c = c0; c < c1; ++c) {
        for (int64_t t = 0; t < tiles; ++t) {
          const int64_t j = j0 + t * L, count = std::min(L, s.S - j), o = s.at(b, c, j);
          if (j >= s.last(c) || j + L <= s.first(c)) {
            if (to != from) {
              zero_tile(s.N, s.head_stride(), count, to + o);
            }
            continue;
          }
          load_tile(s, from + o, count, x.data());
          const Tile tile = part.tile(b, c, packed.data() + t * part.packed_floats());
          if (count == L) {
            forward(tile, x.data(), to + o, s.head_stride());
          } else {
            forward(tile, x.data(), y.data(), L);
            store_tile(y.data(), s.N, s.head_stride(), count, to + o);
          }
        }
      }
    }
  });
}

// dy becomes dx for y = Compose(x), for what each row sees; adds to the gradients of the composition.
void compose_block_backward(const Shape& s, const Part& part, const Part& grads, const float* x, float* dy) {
  const int64_t together = part.tiles_together();
  const int64_t span = together * L, chunks = (s.S + span - 1) / span;
  const int64_t query_row = part.query_rows() * s.N * V, n = s.N / part.groups;
  const int64_t query_floats = s.B * s.C * query_row, base_floats = part.base ? part.groups * n * n * V : 0;
  const int64_t threads = at::get_num_threads();
  const at::Tensor sums = at::zeros({threads, query_floats + base_floats}, at::kFloat);
  float* const all_sums = sums.data_ptr<float>();
  at::parallel_for(0, s.B * chunks, 1, [&](int64_t begin, int64_t end) {
    float* const mine = all_sums + at::get_thread_num() * (query_floats + base_floats);
    std::vector<float> packed(together * part.packed_floats()), dpacked(packed.size());
    std::vector<float> xs(s.N * L), dys(s.N * L), dxs(s.N * L);
    for (int64_t task = begin; task < end; ++task) {
      const int64_t b = task / chunks, j0 = task % chunks * span;
      const int64_t tiles = (std::min(span, s.S - j0) + L - 1) / L;
      for (int64_t t = 0; t < tiles; ++t) {
        part.pack(b, j0 + t * L, s.S - j0 - t * L, packed.data() + t * part.packed_floats());
      }
      std::fill(dpacked.begin(), dpacked.end(), 0.0f);
      for (int64_t c = 0; c < s.C; ++c) {
        for (int64_t t = 0; t < tiles; ++t) {
          const int64_t j = j0 + t * L, count = std::min(L, s.S - j), o = s.at(b, c, j);
          if (j >= s.last(c) || j + L <= s.first(c)) {
            continue;
          }
          load_tile(s, x + o, count, xs.data());
          load_tile(s, dy + o, count, dys.data());
          const TileGrads d{mine + query_floats, mine + (b * s.C + c) * query_row, dpacked.data() + t * part.packed_floats()};
          backward(part.tile(b, c, packed.data() + t * part.packed_floats()), d, xs.data(), dys.data(), dxs.data());
          store_tile(dxs.data(), s.N, s.head_stride(), count, dy + o);
        }
      }
      for (int64_t t = 0; t < tiles; ++t) {
        const int64_t j = j0 + t * L;
        grads.add_packed(b, j, std::min(L, s.S - j), dpacked.data() + t * part.packed_floats());
      }
    }
  });
  if (part.query) {
    grads.query->add_(sums.narrow(1, 0, query_floats).view({threads, s.B, s.C, part.query_rows(), s.N, V}).sum({0, 5}));
  }
  if (part.base) {
    grads.base->add_(sums.narrow(1, query_floats, base_floats).reshape({threads, part.groups, n, n, V}).sum({0, 4}));
  }
}

// A mask that broadcasts to the block: bool (true = visible) or float (added).
struct Mask {
  const at::Tensor* tensor;
  int64_t stride[4] = {0, 0, 0, 0};

  explicit Mask(const MaybeTensor& mask) : tensor(mask ? &*mask : nullptr) {
    for (int64_t d = 0; mask && d < 4; ++d) {
      stride[d] = mask->size(d) == 1 ? 0 : mask->stride(d);
    }
  }
  void apply(int64_t b, int64_t n, int64_t c, int64_t first, int64_t last, float* row) const {
    if (!tensor) {
      return;
    }
    const int64_t o = b * stride[0] + n * stride[1] + c * stride[2], step = stride[3];
    if (tensor->scalar_type() == at::kBool) {
      const bool* visible = tensor->const_data_ptr<bool>() + o;
      for (int64_t j = first; j < last; ++j) {
        row[j] = visible[j * step] ? row[j] : -kInf;
      }
    } else {
      const float* added = tensor->const_data_ptr<float>() + o;
      for (int64_t j = first; j < last; ++j) {
        row[j] += added[j * step];
      }
    }
  }
};

// Calls body(b, n, c, row of the block) for every row, rows split over threads.
template <typename Body>
void for_rows(const Shape& s, const Body& body) {
  at::parallel_for(0, s.B * s.N * s.C, std::max<int64_t>(1, 4096 / std::max<int64_t>(1, s.S)), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      body(i / (s.N * s.C), i / s.C % s.N, i % s.C, i);
    }
  });
}

// Calls body(vector offset, lanes) along row[first, last).
template <typename Body>
inline void for_vectors(int64_t first, int64_t last, const Body& body) {
  int64_t j = first;
  for (; j + V <= last; j += V) {
    body(j, V);
  }
  if (j < last) {
    body(j, last - j);
  }
}

float horizontal_sum(const Vec& v) {
  return at::vec::vec_reduce_all<float>([](Vec a, Vec b) { return a + b; }, v);
}

void zero_outside(float* row, int64_t first, int64_t last, int64_t S) {
  std::fill(row, row + first, 0.0f);
  std::fill(row + last, row + S, 0.0f);
}

// Scores to the softmax of what each row sees; writes the largest score and the sum of exp(score - largest).
void softmax_block(const Shape& s, const Mask& mask, float* block, float* statistics) {
  for_rows(s, [&](int64_t b, int64_t n, int64_t c, int64_t i) {
    float* row = block + i * s.row;
    const int64_t first = s.first(c), last = s.last(c);
    zero_outside(row, first, last, s.S);
    mask.apply(b, n, c, first, last, row);
    Vec top(-kInf);
    for_vectors(first, last, [&](int64_t j, int64_t lanes) {
      top = at::vec::maximum(top, Vec::set(Vec(-kInf), Vec::loadu(row + j, lanes), lanes));
    });
    const float largest = at::vec::vec_reduce_all<float>([](Vec a, Vec b) { return at::vec::maximum(a, b); }, top);
    if (largest == -kInf) {
      std::fill(row + first, row + last, 0.0f);
      statistics[2 * i] = 0.0f;
      statistics[2 * i + 1] = 1.0f;
      return;
    }
    Vec sum(0.0f);
    for_vectors(first, last, [&](int64_t j, int64_t lanes) {
      const Vec e = (Vec::loadu(row + j, lanes) - Vec(largest)).exp();
      e.store(row + j, lanes);
      sum = sum + Vec::set(Vec(0.0f), e, lanes);
    });
    const float total = horizontal_sum(sum);
    statistics[2 * i] = largest;
    statistics[2 * i + 1] = total;
    for_vectors(first, last, [&](int64_t j, int64_t lanes) {
      (Vec::loadu(row + j, lanes) * Vec(1.0f / total)).store(row + j, lanes);
    });
  });
}

// The softmax again, from the statistics.
void softmax_again(const Shape& s, const Mask& mask, const float* statistics, float* block) {
  for_rows(s, [&](int64_t b, int64_t n, int64_t c, int64_t i) {
    float* row = block + i * s.row;
    const int64_t first = s.first(c), last = s.last(c);
    zero_outside(row, first, last, s.S);
    mask.apply(b, n, c, first, last, row);
    const Vec largest(statistics[2 * i]), scale(1.0f / statistics[2 * i + 1]);
    for_vectors(first, last, [&](int64_t j, int64_t lanes) {
      ((Vec::loadu(row + j, lanes) - largest).exp() * scale).store(row + j, lanes);
    });
  });
}

// dp becomes da = p (dp - sum p dp), zero where a row sees nothing.
void softmax_backward(const Shape& s, const float* p, float* dp) {
  for_rows(s, [&](int64_t, int64_t, int64_t c, int64_t i) {
    const float* row = p + i * s.row;
    float* drow = dp + i * s.row;
    const int64_t first = s.first(c), last = s.last(c);
    Vec sum(0.0f);
    for_vectors(first, last, [&](int64_t j, int64_t lanes) {
      sum = sum + Vec::set(Vec(0.0f), Vec::loadu(row + j, lanes) * Vec::loadu(drow + j, lanes), lanes);
    });
    const Vec total(horizontal_sum(sum));
    for_vectors(first, last, [&](int64_t j, int64_t lanes) {
      (Vec::loadu(row + j, lanes) * (Vec::loadu(drow + j, lanes) - total)).store(drow + j, lanes);
    });
    zero_outside(drow, first, last, s.S);
  });
}

}  // namespace

void mix_forward(
    at::Tensor scores, at::Tensor statistics, MaybeTensor pre_base, MaybeTensor pre_query, MaybeTensor pre_key,
    MaybeTensor post_base, MaybeTensor post_query, MaybeTensor post_key, MaybeTensor mask, int64_t pre_groups,
    int64_t post_groups, std::optional<int64_t> lower, std::optional<int64_t> upper) {
  const Shape s(scores, lower, upper);
  const Part pre{pre_base, pre_query, pre_key, s.N, pre_groups}, post{post_base, post_query, post_key, s.N, post_groups};
  float* block = scores.data_ptr<float>();
  if (!pre.empty()) {
    compose_block(s, pre, block, block);
  }
  softmax_block(s, Mask(mask), block, statistics.data_ptr<float>());
  if (!post.empty()) {
    compose_block(s, post, block, block);
  }
}

void mix_backward(
    at::Tensor scores, at::Tensor dweights, at::Tensor statistics, at::Tensor probabilities, at::Tensor weights,
    MaybeTensor pre_base, MaybeTensor pre_query, MaybeTensor pre_key, MaybeTensor post_base, MaybeTensor post_query,
    MaybeTensor post_key, MaybeTensor mask, MaybeTensor dpre_base, MaybeTensor dpre_query, MaybeTensor dpre_key,
    MaybeTensor dpost_base, MaybeTensor dpost_query, MaybeTensor dpost_key, MaybeTensor dmask, int64_t pre_groups,
    int64_t post_groups, std::optional<int64_t> lower, std::optional<int64_t> upper) {
  TORCH_CHECK(dweights.strides() == scores.strides(), "dweights must be laid out like scores");
  const Shape s(scores, lower, upper);
  const Part pre{pre_base, pre_query, pre_key, s.N, pre_groups}, post{post_base, post_query, post_key, s.N, post_groups};
  const Part dpre{dpre_base, dpre_query, dpre_key, s.N, pre_groups};
  const Part dpost{dpost_base, dpost_query, dpost_key, s.N, post_groups};
  const float* x = scores.const_data_ptr<float>();
  float* dy = dweights.data_ptr<float>();
  float* p = probabilities.data_ptr<float>();
  if (pre.empty()) {
    probabilities.narrow(3, 0, s.S).copy_(scores);
  } else {
    compose_block(s, pre, x, p);
  }
  softmax_again(s, Mask(mask), statistics.const_data_ptr<float>(), p);
  if (post.empty()) {
    weights.copy_(probabilities);
  } else {
    compose_block(s, post, p, weights.data_ptr<float>());
    compose_block_backward(s, post, dpost, p, dy);
  }
  softmax_backward(s, p, dy);
  if (dmask) {
    dmask->add_(at::sum_to(dweights, dmask->sizes()));
  }
  if (!pre.empty()) {
    compose_block_backward(s, pre, dpre, x, dy);
  }
}

}  // namespace dcformer

TORCH_LIBRARY(dcformer_cpu, m) {
  m.def(
      "mix_forward(Tensor(a!) scores, Tensor(b!) statistics, Tensor? pre_base, Tensor? pre_query, Tensor? pre_key, "
      "Tensor? post_base, Tensor? post_query, Tensor? post_key, Tensor? mask, int pre_groups, int post_groups, int? lower, "
      "int? upper) -> ()");
  m.def(
      "mix_backward(Tensor scores, Tensor(a!) dweights, Tensor statistics, Tensor(b!) probabilities, Tensor(c!) weights, "
      "Tensor? pre_base, Tensor? pre_query, Tensor? pre_key, Tensor? post_base, Tensor? post_query, Tensor? post_key, "
      "Tensor? mask, Tensor(d!)? dpre_base, Tensor(e!)? dpre_query, Tensor(f!)? dpre_key, Tensor(g!)? dpost_base, "
      "Tensor(h!)? dpost_query, Tensor(i!)? dpost_key, Tensor(j!)? dmask, int pre_groups, int post_groups, int? lower, "
      "int? upper) -> ()");
}

TORCH_LIBRARY_IMPL(dcformer_cpu, CPU, m) {
  m.impl("mix_forward", dcformer::mix_forward);
  m.impl("mix_backward", dcformer::mix_backward);
}
