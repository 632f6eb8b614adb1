// The forward pass. Letters: problem.h.
//
// Two sweeps over the chunks of a block. The first makes scores, composes them and leaves exp(a - m) with m the largest of a row in
// that chunk; the second knows the whole row's largest score and sum, makes the weights of them, composes those and multiplies
// them with the values. So each exponential is taken once, and the chunks of a block are all that is kept.

#pragma once

#include "problem.h"

namespace dcformer {

// The largest score and the sum of exp(score - largest) of some rows, a number a head each.
struct Softmax {
  float* largest;
  float* sum;

  Softmax at(int64_t i) const {
    return {largest + i, sum + i};
  }
};

inline Vec finite(const Vec& largest) {  // the largest of no scores is -inf, and is not to be subtracted
  return Vec::blendv(largest, Vec(0.0f), largest == Vec(-kInf));
}

// A row's composed scores become exp(a - largest), zero where it is not seen.
inline void exponentials(const Problem& p, const Row& row, float* x, const Softmax& out) {
  for (int64_t n = 0; n < p.N; ++n) {
    float* const head = x + n * kKeys;
    apply_mask(p, row, n, head);
    const int64_t begin = row.tile_begin() * L, end = row.tile_end() * L;
    Vec top(-kInf), sum(0.0f);
    for (int64_t j = begin; j < end; j += V) {
      top = at::vec::maximum(top, Vec::loadu(head + j));
    }
    const float largest = at::vec::vec_reduce_all<float>([](Vec a, Vec b) { return at::vec::maximum(a, b); }, top);
    const Vec offset(largest == -kInf ? 0.0f : largest);
    for (int64_t j = begin; j < end; j += V) {
      const Vec e = (Vec::loadu(head + j) - offset).exp_u20();
      e.store(head + j);
      sum = sum + e;
    }
    out.largest[n] = largest;
    out.sum[n] = at::vec::vec_reduce_all<float>([](Vec a, Vec b) { return a + b; }, sum);
  }
  clear_unseen(p, row, x);
}

// Takes what another chunk, or another task, found of the same rows.
inline void merge(int64_t count, const Softmax& into, const Softmax& from) {
  for (int64_t i = 0; i < count; i += V) {
    const Vec a = Vec::loadu(into.largest + i), b = Vec::loadu(from.largest + i), largest = at::vec::maximum(a, b);
    const Vec offset = finite(largest);
    const Vec sum = Vec::loadu(into.sum + i) * (a - offset).exp() + Vec::loadu(from.sum + i) * (b - offset).exp();
    largest.store(into.largest + i);
    sum.store(into.sum + i);
  }
}

// Softmaxes of `rows` rows that have seen nothing.
inline void reset(int64_t count, const Softmax& s) {
  std::fill_n(s.largest, count, -kInf);
  std::fill_n(s.sum, count, 0.0f);
}

// Weights of a row: exp(a - largest of the chunk) times exp(largest of the chunk - largest) / sum, composed and dropped.
inline void weigh(
    const Problem& p, const Row& row, const float* chunk_largest, const Softmax& whole, float* x, float* factors, float* spare) {
  for (int64_t n = 0; n < p.padded_heads(); n += V) {
    const Vec sum = Vec::loadu(whole.sum + n), offset = finite(Vec::loadu(whole.largest + n));
    const Vec e = (Vec::loadu(chunk_largest + n) - offset).exp();
    (e / Vec::blendv(sum, Vec(1.0f), sum == Vec(0.0f))).store(factors + n);
  }
  for (int64_t n = 0; n < p.N; ++n) {
    for (int64_t j = row.tile_begin() * L; j < row.tile_end() * L; j += V) {
      (Vec::loadu(x + n * kKeys + j) * Vec(factors[n])).store(x + n * kKeys + j);
    }
  }
  if (!p.post.empty()) {
    compose(p, p.post, row, x, x, spare);
    clear_unseen(p, row, x);
  }
  drop(p, row, x);
}

// out [B, N, T, Dv], statistics [B, N, T, 2] (largest and sum; 0 and 1 where a row sees no key). Both hold zeros and (0, 1) before.
inline void forward(const Problem& p, const Heads& out, float* statistics) {
  const Plan plan(p, 1);
  const int64_t heads = p.padded_heads(), row_floats = p.row_floats();
  const Buffer chunks(plan.rows * row_floats), largest(plan.rows * heads);
  const Buffer wholes(2 * plan.tasks * plan.queries * heads), partial(plan.tasks * p.N * plan.queries * p.Dv);
  for (const Block& block : plan.blocks) {
    const int64_t C = block.queries, splits = plan.splits(block);
    const auto chunk_at = [&](const Task& task, int64_t chunk) { return (task.row * block.chunks + chunk) * C; };
    const auto whole = [&](int64_t task) {
      float* const at = wholes + 2 * task * C * heads;
      return Softmax{at, at + C * heads};
    };

    for_tasks(plan, block, [&](const Task& task) {
      std::vector<float> spare(row_floats), sums(heads);
      reset(C * heads, whole(task.index));
      for (int64_t chunk = task.begin; chunk < task.end; ++chunk) {
        float* const x = chunks + chunk_at(task, chunk) * row_floats;
        products(p, block, task.b, block.chunk0 + chunk, p.scale, p.query, p.key, p.D, x);
        for (int64_t c = 0; c < C; ++c) {
          const Row row(p, task.b, block.t0 + c, block.chunk0 + chunk);
          const Softmax found{largest + (chunk_at(task, chunk) + c) * heads, sums.data()};
          reset(heads, found);
          if (row.empty()) {
            std::fill_n(x + c * row_floats, row_floats, 0.0f);
            continue;
          }
          if (!p.pre.empty()) {
            compose(p, p.pre, row, x + c * row_floats, x + c * row_floats, spare.data());
          }
          exponentials(p, row, x + c * row_floats, found);
          merge(heads, whole(task.index).at(c * heads), found);
        }
      }
    });

    for (int64_t r = 0; r < block.batch; ++r) {
      for (int64_t split = 1; split < splits; ++split) {
        merge(C * heads, whole(r * splits), whole(r * splits + split));
      }
      for (int64_t n = 0; n < p.N; ++n) {
        float* const to = statistics + 2 * (((block.b0 + r) * p.N + n) * p.T + block.t0);
        for (int64_t c = 0; c < C; ++c) {
          const Softmax s = whole(r * splits).at(c * heads + n);
          to[2 * c] = *s.largest == -kInf ? 0 : *s.largest;
          to[2 * c + 1] = *s.sum == 0 ? 1 : *s.sum;
        }
      }
    }

    for_tasks(plan, block, [&](const Task& task) {
      std::vector<float> spare(row_floats), factors(heads);
      const Buffer narrow(p.type == Factor::kFloat ? 0 : C * row_floats);
      for (int64_t chunk = task.begin; chunk < task.end; ++chunk) {
        float* const x = chunks + chunk_at(task, chunk) * row_floats;
        const int64_t j = (block.chunk0 + chunk) * kKeys, count = std::min(kKeys, p.S - j);
        for (int64_t c = 0; c < C; ++c) {
          const Row row(p, task.b, block.t0 + c, block.chunk0 + chunk);
          if (!row.empty()) {
            weigh(p, row, largest + (chunk_at(task, chunk) + c) * heads, whole(task.row * splits).at(c * heads), x + c * row_floats,
                  factors.data(), spare.data());
          }
        }
        const ChunkFactors weights(p, C, x, narrow);
        for (int64_t n = 0; n < p.N; ++n) {
          const bool alone = splits == 1;
          float* const to = alone ? out.at(task.b, n, block.t0) : partial + (task.index * p.N + n) * C * p.Dv;
          multiply(p.type, C, p.Dv, count, 1, weights.head(n), p.value.at(task.b, p.kv_head(n), j), chunk > task.begin, to,
                   alone ? out.row : p.Dv);
        }
      }
    });

    add_parts(p, block, splits, partial, p.Dv, out);
  }
}

}  // namespace dcformer
