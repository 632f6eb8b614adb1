// The backward pass. Letters: problem.h.
//
// Two sweeps again. The first makes scores, probabilities p and gradients dp of a block, and with them all that belongs to the second
// composition and the values; it sums p dp over each row. The second makes da = p (dp - sum) and all that belongs to the first composition,
// queries and keys. A task owns keys, so gradients of keys, values and key-wise weights are added without conflict; those of
// query-wise weights, static bases and queries are kept a task and added up in a fixed order.

#include "problem.h"

namespace dcformer {
namespace {

// What the tasks of a block sum up of one composition: query-wise weights [task, C, 2R+1, N, V] and static base [task, G, n, n, V],
// vectors along the keys still. The static base's sum over blocks [G, n, n] is in float64: it has as many terms as there are pairs.
class Sums {
 public:
  Sums(const Problem& p, const Side& side, const Plan& plan)
      : p_(p), side_(side), query_row_(side.query ? (2 * side.query_rank + 1) * p.N * V : 0),
        query_task_(plan.queries * query_row_), base_task_(side.base ? p.N * (p.N / side.groups) * V : 0),
        query_(plan.tasks * query_task_), base_(plan.tasks * base_task_), whole_base_(base_task_ / V) {}

  void start(const Task& task) {
    std::fill_n(query_ + task.index * query_task_, query_task_, 0.0f);
    std::fill_n(base_ + task.index * base_task_, base_task_, 0.0f);
  }
  TileGrads at(const Task& task, int64_t c, float* key) {
    return {side_.base ? base_ + task.index * base_task_ : nullptr,
            side_.query ? query_ + task.index * query_task_ + c * query_row_ : nullptr, key};
  }
  // Writes the gradients of the block's query-wise weights, and adds to those of the static base.
  void finish(const Plan& plan, const Block& block, const SideGrads& grads) {
    const int64_t splits = plan.splits(block), row = query_row_ / V;
    if (side_.query) {
      at::parallel_for(0, block.batch * block.queries, 8, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          const int64_t r = i / block.queries, c = i % block.queries;
          float* const to = grads.query + ((block.b0 + r) * p_.T + block.t0 + c) * row;
          for (int64_t k = 0; k < row; ++k) {
            to[k] = total(query_ + r * splits * query_task_ + c * query_row_ + k * V, query_task_, splits);
          }
        }
      });
    }
    at::parallel_for(0, base_task_ / V, 64, [&](int64_t begin, int64_t end) {
      for (int64_t k = begin; k < end; ++k) {
        whole_base_[k] += total(base_ + k * V, base_task_, block.batch * splits);
      }
    });
  }
  // Writes the gradients of the static base, of all blocks.
  void finish_base(const SideGrads& grads) {
    std::copy(whole_base_.begin(), whole_base_.end(), grads.base);
  }

 private:
  // The sum over the lanes of `count` vectors, `step` apart.
  static float total(const float* from, int64_t step, int64_t count) {
    Vec sum(0.0f);
    for (int64_t i = 0; i < count; ++i) {
      sum = sum + Vec::loadu(from + i * step);
    }
    return at::vec::vec_reduce_all<float>([](Vec a, Vec b) { return a + b; }, sum);
  }

  const Problem& p_;
  const Side& side_;
  int64_t query_row_, query_task_, base_task_;
  Buffer query_, base_;
  std::vector<double> whole_base_;
};

// Backward of y = Compose(x) for the rows of a chunk where they are seen, dy to dx; makes y too where it is wanted. Tile by tile, as the
// forward pass.
template <bool Forward>
void compose_backward(
    const Problem& p, const Side& side, const SideGrads& grads, Sums& sums, const Block& block, const Task& task, int64_t chunk,
    const float* x, float* dy, float* y, float* spare) {
  for (int64_t t = 0; t < kTiles; ++t) {
    for (int64_t c = 0; c < block.queries; ++c) {
      const Row row(p, task.b, block.t0 + c, chunk);
      if (t < row.tile_begin() || t >= row.tile_end()) {
        continue;
      }
      const int64_t o = c * p.row_floats() + t * L;
      const Tile tile = dcformer::tile(p, side, row, t);
      const TileGrads d = sums.at(task, c, side.key ? grads.key + (tile.key - side.key) : nullptr);
      backward<Forward>(tile, d, x + o, dy + o, offset(y, o), spare);
    }
  }
}

// A row's composed scores become probabilities, zero where it is not seen. largest and inverse (of the sum): a number a head.
void probabilities(const Problem& p, const Row& row, float* x, const float* largest, const float* inverse) {
  for (int64_t n = 0; n < p.N; ++n) {
    float* const head = x + n * kKeys;
    apply_mask(p, row, n, head);
    for (int64_t j = row.tile_begin() * L; j < row.tile_end() * L; j += V) {
      ((Vec::loadu(head + j) - Vec(largest[n])).exp_u20() * Vec(inverse[n])).store(head + j);
    }
  }
  clear_unseen(p, row, x);
}

// The gradient of a mask from that of the composed scores of a row.
void add_mask_grad(const Problem& p, const MaskGrad& mask, const Task& task, const Row& row, const float* da) {
  const auto& stride = mask.stride;
  for (int64_t n = 0; n < p.N; ++n) {
    float* const to = mask.data + task.index * mask.copy + row.b * stride[0] + n * stride[1] + row.i * stride[2];
    for (int64_t j = row.lo; j < row.hi; ++j) {
      to[(row.chunk * kKeys + j) * stride[3]] += da[n * kKeys + j];
    }
  }
}

// For all heads, a chunk of keys [B, K, S, padded D] += alpha x^T a: x is [C, N, kKeys], a the block's rows [N, C, padded D].
void add_to_keys(
    const Problem& p, const Block& block, const Task& task, int64_t chunk, float alpha, const float* x, const float* a, int64_t D,
    float* keys) {
  const int64_t width = padded(D), count = std::min(kKeys, p.S - chunk * kKeys);
  std::array<Span, kKeys / kPanelRows + 1> seeing;
  for (int64_t j = 0; j < count; j += kPanelRows) {
    seeing[j / kPanelRows] = queries_seeing(p, block, chunk, {j, std::min(count, j + kPanelRows)});
  }
  for (int64_t n = 0; n < p.N; ++n) {
    for (int64_t j = 0; j < count; j += kPanelRows) {
      const Span& c = seeing[j / kPanelRows];
      multiply(std::min(kPanelRows, count - j), width, c.size(), alpha, {x + c.begin * p.row_floats() + n * kKeys + j, 1, p.row_floats()},
               {a + (n * block.queries + c.begin) * width, width, L}, true,
               keys + ((task.b * p.K + n / p.shared()) * p.S + chunk * kKeys + j) * width, width);
    }
  }
}

// A task's own memory.
struct BackwardScratch {
  float *queries, *grad_outs, *weights, *rows, *panels, *spare, *largest, *inverse;
  int64_t size;

  BackwardScratch(const Problem& p, int64_t C, float* memory) {
    const int64_t width = padded(p.D), value_width = padded(p.Dv), widest = std::max(width, value_width);
    Arrays arrays(memory);
    queries = arrays.take(p.N * C * width);
    grad_outs = arrays.take(p.N * C * value_width);
    weights = arrays.take(C * p.row_floats());
    rows = arrays.take(kKeys * widest);
    panels = arrays.take(kKeys * widest);
    spare = arrays.take(p.row_floats());
    largest = arrays.take(C * p.padded_heads());
    inverse = arrays.take(C * p.padded_heads());
    size = arrays.taken();
  }
};

}  // namespace

void backward(const Problem& p, const Heads& grad_out, const float* statistics, const Grads& grads) {
  const Plan plan(p, 3, grads.mask.data != nullptr);  // rows of the batch may share a mask
  const int64_t row_floats = p.row_floats(), heads = p.padded_heads(), width = padded(p.D), value_width = padded(p.Dv);
  const int64_t scratch_floats = BackwardScratch(p, plan.queries, nullptr).size;
  const Buffer scores(plan.rows * row_floats), ps(plan.rows * row_floats), dps(plan.rows * row_floats);
  const Buffer row_sums(plan.tasks * plan.queries * heads), partial(plan.tasks * p.N * plan.queries * width);
  const Buffer scratch(plan.tasks * scratch_floats);
  TORCH_CHECK(!grads.mask.copy || plan.tasks <= plan.threads);
  Sums pre_sums(p, p.pre, plan), post_sums(p, p.post, plan);
  for (const Block& block : plan.blocks) {
    const int64_t C = block.queries, splits = plan.splits(block);
    const auto chunk_at = [&](const Task& task, int64_t chunk) { return (task.row * block.chunks + chunk) * C * row_floats; };
    const auto sums_at = [&](int64_t task, int64_t c) { return row_sums + (task * C + c) * heads; };

    for_tasks(plan, block, [&](const Task& task) {
      const BackwardScratch mine(p, C, scratch + task.index * scratch_floats);
      post_sums.start(task);
      std::fill_n(sums_at(task.index, 0), C * heads, 0.0f);
      for (int64_t n = 0; n < p.N; ++n) {
        p.query.read(task.b, n, block.t0, C, p.D, width, mine.queries + n * C * width);
        grad_out.read(task.b, n, block.t0, C, p.Dv, value_width, mine.grad_outs + n * C * value_width);
        const float* const from = statistics + 2 * ((task.b * p.N + n) * p.T + block.t0);
        for (int64_t c = 0; c < C; ++c) {
          mine.largest[c * heads + n] = from[2 * c];
          mine.inverse[c * heads + n] = 1 / from[2 * c + 1];
        }
      }
      for (int64_t i = task.begin; i < task.end; ++i) {
        const int64_t chunk = block.chunk0 + i;
        float *const x = scores + chunk_at(task, i), *const prob = ps + chunk_at(task, i), *const dprob = dps + chunk_at(task, i);
        products(p, block, task, chunk, p.scale, mine.queries, p.key, p.D, mine.rows, mine.panels, x);
        products(p, block, task, chunk, 1, mine.grad_outs, p.value, p.Dv, mine.rows, mine.panels, dprob);
        if (p.pre.empty()) {
          std::copy_n(x, C * row_floats, prob);
        } else {
          compose(p, p.pre, block, task, chunk, x, prob, mine.spare);
        }
        for (int64_t c = 0; c < C; ++c) {
          const Row row(p, task.b, block.t0 + c, chunk);
          probabilities(p, row, prob + c * row_floats, mine.largest + c * heads, mine.inverse + c * heads);
          drop(p, row, dprob + c * row_floats);
        }
        if (p.post.empty()) {
          std::copy_n(prob, C * row_floats, mine.weights);
        } else {
          compose_backward<true>(p, p.post, grads.post, post_sums, block, task, chunk, prob, dprob, mine.weights, mine.spare);
        }
        for (int64_t c = 0; c < C; ++c) {
          const Row row(p, task.b, block.t0 + c, chunk);
          clear_unseen(p, row, mine.weights + c * row_floats);
          drop(p, row, mine.weights + c * row_floats);
        }
        for (int64_t c = 0; c < C; ++c) {
          const Row row(p, task.b, block.t0 + c, chunk);
          float* const sum = sums_at(task.index, c);
          for (int64_t n = 0; n < p.N; ++n) {
            Vec total(0.0f);
            for (int64_t j = row.tile_begin() * L; j < row.tile_end() * L; j += V) {
              const int64_t o = c * row_floats + n * kKeys + j;
              total = fmadd(Vec::loadu(prob + o), Vec::loadu(dprob + o), total);
            }
            sum[n] += at::vec::vec_reduce_all<float>([](Vec a, Vec b) { return a + b; }, total);
          }
        }
        add_to_keys(p, block, task, chunk, 1, mine.weights, mine.grad_outs, p.Dv, grads.value);
      }
    });

    post_sums.finish(plan, block, grads.post);
    for (int64_t r = 0; r < block.batch; ++r) {
      for (int64_t split = 1; split < splits; ++split) {
        for (int64_t i = 0; i < C * heads; ++i) {
          sums_at(r * splits, 0)[i] += sums_at(r * splits + split, 0)[i];
        }
      }
    }

    for_tasks(plan, block, [&](const Task& task) {
      const BackwardScratch mine(p, C, scratch + task.index * scratch_floats);
      pre_sums.start(task);
      for (int64_t i = task.end; i-- > task.begin;) {  // what was made last is still near
        const int64_t chunk = block.chunk0 + i;
        const float *const x = scores + chunk_at(task, i), *const prob = ps + chunk_at(task, i);
        float* const ds = dps + chunk_at(task, i);
        for (int64_t c = 0; c < C; ++c) {
          const Row row(p, task.b, block.t0 + c, chunk);
          const float* const sum = sums_at(task.row * splits, c);
          float* const da = ds + c * row_floats;
          for (int64_t n = 0; n < p.N; ++n) {
            for (int64_t j = row.tile_begin() * L; j < row.tile_end() * L; j += V) {
              const Vec y = Vec::loadu(prob + c * row_floats + n * kKeys + j);
              (y * (Vec::loadu(da + n * kKeys + j) - Vec(sum[n]))).store(da + n * kKeys + j);
            }
          }
          clear_unseen(p, row, da);
          if (grads.mask.data) {
            add_mask_grad(p, grads.mask, task, row, da);
          }
        }
        if (!p.pre.empty()) {
          compose_backward<false>(p, p.pre, grads.pre, pre_sums, block, task, chunk, x, ds, nullptr, mine.spare);
        }
        weighted_sums(p, block, task, chunk, p.scale, ds, p.key, p.D, mine.rows, i + 1 < task.end,
                      partial + task.index * p.N * C * width);
        add_to_keys(p, block, task, chunk, p.scale, ds, mine.queries, p.D, grads.key);
      }
    });

    pre_sums.finish(plan, block, grads.pre);
    add_parts(p, plan, block, partial, p.D, grads.query);
  }
  pre_sums.finish_base(grads.pre);
  post_sums.finish_base(grads.post);
}

void unpack(const float* from, const KeyWeights& to) {
  const int64_t row = to.rows * to.N, all = packed_floats(to.S, to.N, to.rows / 2);
  at::parallel_for(0, to.B * to.S, 256, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t j = i % to.S;
      const float* const column = from + i / to.S * all + j / L * row * L + j % L;
      for (int64_t k = 0; k < row; ++k) {
        to.data[i * row + k] = column[k * L];
      }
    }
  });
}

}  // namespace dcformer
