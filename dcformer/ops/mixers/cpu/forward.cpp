// The forward pass. Letters: problem.h.
//
// Two sweeps over the chunks of a block. The first makes scores, composes them and leaves exp(a - m) with m the largest of a row in
// that chunk; the second knows the whole row's largest score and sum, makes the weights of them, composes those and multiplies
// them with the values. So each exponential is taken once, and the chunks of a block are all that is kept.

#include "problem.h"

namespace dcformer {
namespace {

// The largest score and the sum of exp(score - largest) of some rows, a number a head each.
struct Softmax {
  float* largest;
  float* sum;

  Softmax at(int64_t i) const {
    return {largest + i, sum + i};
  }
};

Vec finite(const Vec& largest) {  // the largest of no scores is -inf, and is not to be subtracted
  return Vec::blendv(largest, Vec(0.0f), largest == Vec(-kInf));
}

// out = exp(a - largest) of `count` composed scores of one head, a multiple of V.
C10_ALWAYS_INLINE void exponentials(int64_t count, const float* a, float* out, float* largest, float* total) {
  Vec top(-kInf), sum(0.0f);
#pragma GCC unroll 8
  for (int64_t j = 0; j < count; j += V) {
    top = at::vec::maximum(top, Vec::loadu(a + j));
  }
  *largest = at::vec::vec_reduce_all<float>([](Vec a, Vec b) { return at::vec::maximum(a, b); }, top);
  const Vec offset(*largest == -kInf ? 0.0f : *largest);
#pragma GCC unroll 8
  for (int64_t j = 0; j < count; j += V) {
    const Vec e = (Vec::loadu(a + j) - offset).exp_u20();
    e.store(out + j);
    sum = sum + e;
  }
  *total = at::vec::vec_reduce_all<float>([](Vec a, Vec b) { return a + b; }, sum);
}

// The same for all heads of a row, as far as its tiles reach.
void exponentials(const Problem& p, const Row& row, float* a, const Softmax& found, float* out) {
  const int64_t begin = row.tile_begin() * L, end = row.tile_end() * L;
  for (int64_t n = 0; n < p.N; ++n) {
    float *const from = a + n * kKeys, *const to = out + n * kKeys;
    apply_mask(p, row, n, from);
    if (begin == 0 && end == kKeys) {  // a constant count is unrolled
      exponentials(kKeys, from, to, found.largest + n, found.sum + n);
    } else {
      exponentials(end - begin, from + begin, to + begin, found.largest + n, found.sum + n);
    }
  }
}

// Takes what another chunk, or another task, found of the same rows.
void merge(int64_t count, const Softmax& into, const Softmax& from) {
  for (int64_t i = 0; i < count; i += V) {
    const Vec a = Vec::loadu(into.largest + i), b = Vec::loadu(from.largest + i), largest = at::vec::maximum(a, b);
    const Vec offset = finite(largest);
    const Vec sum = Vec::loadu(into.sum + i) * (a - offset).exp() + Vec::loadu(from.sum + i) * (b - offset).exp();
    largest.store(into.largest + i);
    sum.store(into.sum + i);
  }
}

// Numbers of rows that have seen nothing yet.
void reset(int64_t count, const Softmax& s) {
  std::fill_n(s.largest, count, -kInf);
  std::fill_n(s.sum, count, 0.0f);
}

// Probabilities of a row: exp(a - largest of the chunk) times exp(largest of the chunk - largest) / sum.
void normalize(
    const Problem& p, const Row& row, const float* x, const float* chunk_largest, const Softmax& whole, float* factors, float* out) {
  for (int64_t n = 0; n < p.padded_heads(); n += V) {
    const Vec sum = Vec::loadu(whole.sum + n), offset = finite(Vec::loadu(whole.largest + n));
    const Vec e = (Vec::loadu(chunk_largest + n) - offset).exp();
    (e / Vec::blendv(sum, Vec(1.0f), sum == Vec(0.0f))).store(factors + n);
  }
  for (int64_t n = 0; n < p.N; ++n) {
    for (int64_t j = row.tile_begin() * L; j < row.tile_end() * L; j += V) {
      (Vec::loadu(x + n * kKeys + j) * Vec(factors[n])).store(out + n * kKeys + j);
    }
  }
}

// A task's own memory.
struct ForwardScratch {
  float *queries, *chunk, *rows, *panels, *spare, *numbers;
  int64_t size;

  ForwardScratch(const Problem& p, int64_t C, float* memory) {
    const int64_t width = padded(p.D), widest = std::max(width, padded(p.Dv));
    Arrays arrays(memory);
    queries = arrays.take(p.N * C * width);
    chunk = arrays.take(C * p.row_floats());
    rows = arrays.take(kKeys * widest);
    panels = arrays.take(kKeys * width);
    spare = arrays.take(p.row_floats());
    numbers = arrays.take(p.padded_heads());
    size = arrays.taken();
  }
};

}  // namespace

void forward(const Problem& p, const Heads& out, float* statistics) {
  const Plan plan(p, 1);
  const int64_t heads = p.padded_heads(), row_floats = p.row_floats(), width = padded(p.D);
  const int64_t scratch_floats = ForwardScratch(p, plan.queries, nullptr).size;
  const Buffer chunks(plan.rows * row_floats), largest(plan.rows * heads), scratch(plan.tasks * scratch_floats);
  const Buffer wholes(2 * plan.tasks * plan.queries * heads), partial(plan.tasks * p.N * plan.queries * padded(p.Dv));
  for (const Block& block : plan.blocks) {
    const int64_t C = block.queries, splits = plan.splits(block);
    const auto chunk_at = [&](const Task& task, int64_t chunk) { return (task.row * block.chunks + chunk) * C; };
    const auto whole = [&](int64_t task) {
      float* const at = wholes + 2 * task * C * heads;
      return Softmax{at, at + C * heads};
    };

    for_tasks(plan, block, [&](const Task& task) {
      const ForwardScratch mine(p, C, scratch + task.index * scratch_floats);
      for (int64_t n = 0; n < p.N; ++n) {
        p.query.read(task.b, n, block.t0, C, p.D, width, mine.queries + n * C * width);
      }
      reset(C * heads, whole(task.index));
      for (int64_t i = task.begin; i < task.end; ++i) {
        products(p, block, task, block.chunk0 + i, p.scale, mine.queries, p.key, p.D, mine.rows, mine.panels, mine.chunk);
        if (!p.pre.empty()) {
          compose(p, p.pre, block, task, block.chunk0 + i, mine.chunk, mine.chunk, mine.spare);
        }
        for (int64_t c = 0; c < C; ++c) {
          const Row row(p, task.b, block.t0 + c, block.chunk0 + i);
          const Softmax found{largest + (chunk_at(task, i) + c) * heads, mine.numbers};
          reset(heads, found);
          if (!row.empty()) {
            exponentials(p, row, mine.chunk + c * row_floats, found, chunks + (chunk_at(task, i) + c) * row_floats);
            merge(heads, whole(task.index).at(c * heads), found);
          }
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
      const ForwardScratch mine(p, C, scratch + task.index * scratch_floats);
      for (int64_t i = task.end; i-- > task.begin;) {  // what was made last is still near
        for (int64_t c = 0; c < C; ++c) {
          const Row row(p, task.b, block.t0 + c, block.chunk0 + i);
          if (!row.empty()) {
            normalize(p, row, chunks + (chunk_at(task, i) + c) * row_floats, largest + (chunk_at(task, i) + c) * heads,
                      whole(task.row * splits).at(c * heads), mine.numbers, mine.chunk + c * row_floats);
          }
        }
        if (!p.post.empty()) {
          compose(p, p.post, block, task, block.chunk0 + i, mine.chunk, mine.chunk, mine.spare);
        }
        for (int64_t c = 0; c < C; ++c) {
          const Row row(p, task.b, block.t0 + c, block.chunk0 + i);
          clear_unseen(p, row, mine.chunk + c * row_floats);
          drop(p, row, mine.chunk + c * row_floats);
        }
        weighted_sums(p, block, task, block.chunk0 + i, 1, mine.chunk, p.value, p.Dv, mine.rows, i + 1 < task.end,
                      partial + task.index * p.N * C * padded(p.Dv));
      }
    });

    add_parts(p, plan, block, partial, p.Dv, out);
  }
}

void pack(const KeyWeights& from, float* to) {
  const auto &step = from.stride;
  const int64_t rows = from.rows, N = from.N, tile = tile_floats(N, rows / 2), tiles = packed_floats(from.S, N, rows / 2) / tile;
  // Weights of one key in one piece are whole columns of a tile.
  const bool whole = step[3] == 1 && step[2] == N && rows * N % V == 0;
  at::parallel_for(0, from.B * tiles, 16, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t j0 = i % tiles * L, count = std::clamp<int64_t>(from.S - j0, 0, L);
      const float* const here = from.data + i / tiles * step[0] + j0 * step[1];
      float* const panel = to + i * tile;
      if (whole && count == L) {
        transpose_panel(rows * N, here, step[1], panel);
        continue;
      }
      std::fill_n(panel, tile, 0.0f);
      for (int64_t n = 0; n < N; ++n) {  // in a cache the weights of a head and key are one piece
        for (int64_t l = 0; l < count; ++l) {
          const float* const key = here + n * step[3] + l * step[1];
          __builtin_prefetch(key + L * step[1]);
          for (int64_t r = 0; r < rows; ++r) {
            panel[(r * N + n) * L + l] = key[r * step[2]];
          }
        }
      }
    }
  });
}

}  // namespace dcformer
