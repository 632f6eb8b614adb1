// Runs the CPU kernel without PyTorch, for sanitizers: odd shapes, every feature, memory poisoned with NaN, tensors of exactly their size.

#include "problem.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>

void* operator new(std::size_t size, std::align_val_t align) {
  void* memory = nullptr;
  if (posix_memalign(&memory, static_cast<std::size_t>(align), size) != 0) {
    std::abort();
  }
  std::memset(memory, 0xFF, size);  // NaN
  return memory;
}

void operator delete(void* memory, std::align_val_t) noexcept {
  std::free(memory);
}

using namespace dcformer;

namespace {

struct Case {
  const char* name;
  int64_t B, N, K, T, S, D, Dv, groups, query_rank, key_rank;  // a rank of -1: no such part
  bool base, causal;
  int64_t window;
  char mask;  // 'b' bool, 'f' float, 'r' float that is one for all keys, or ' '
  double dropout = 0;
};

std::mt19937 generator(1);

std::vector<float> draw(int64_t size, float scale = 1) {
  std::normal_distribution<float> normal(0, scale);
  std::vector<float> out(size);
  std::generate(out.begin(), out.end(), [&] { return normal(generator); });
  return out;
}

Heads heads(const std::vector<float>& x, int64_t heads, int64_t rows, int64_t D) {
  return {reinterpret_cast<char*>(const_cast<float*>(x.data())), Type::kFloat, heads * rows * D, rows * D, D};
}

bool all_finite(const std::vector<float>& x) {
  return std::all_of(x.begin(), x.end(), [](float value) { return std::isfinite(value); });
}

// The tensors of one side and of its gradients.
struct SideTensors {
  std::vector<float> base, query, key, packed, dbase, dquery, dpacked, dkey;
  KeyWeights weights;
  Side side;
  SideGrads grads;

  explicit SideTensors(const Case& c) {
    const int64_t n = c.N / c.groups;
    base = draw(c.base ? c.N * n : 0, 0.1f);
    query = draw(c.query_rank < 0 ? 0 : c.B * c.T * (2 * c.query_rank + 1) * c.N, 0.3f);
    const int64_t rows = 2 * c.key_rank + 1;
    key = draw(c.key_rank < 0 ? 0 : c.B * c.S * rows * c.N, 0.3f);
    packed.resize(c.key_rank < 0 ? 0 : c.B * packed_floats(c.S, c.N, c.key_rank));
    weights = {key.data(), c.B, c.S, rows, c.N, {c.S * rows * c.N, rows * c.N, c.N, 1}};
    if (c.T == 1) {  // as a cache has them, [B, N, S, rows]
      weights.stride = {c.N * c.S * rows, rows, 1, c.S * rows};
    }
    if (c.key_rank >= 0) {
      pack(weights, packed.data());
    }
    dbase.resize(base.size());
    dquery.resize(query.size());
    dpacked.resize(packed.size());
    dkey.resize(key.size());
    const auto data = [](std::vector<float>& x) { return x.empty() ? nullptr : x.data(); };
    side = {data(base), data(query), data(packed), std::max<int64_t>(0, c.query_rank), std::max<int64_t>(0, c.key_rank), c.groups};
    grads = {data(dbase), data(dquery), data(dpacked)};
  }
  void unpack_grads() {
    if (!dkey.empty()) {
      unpack(dpacked.data(), {dkey.data(), weights.B, weights.S, weights.rows, weights.N, {}});
    }
  }
};

std::vector<std::vector<float>> run(const Case& c) {
  generator.seed(1);
  const auto query = draw(c.B * c.N * c.T * c.D), key = draw(c.B * c.K * c.S * c.D), value = draw(c.B * c.K * c.S * c.Dv);
  const auto grad_out = draw(c.B * c.N * c.T * c.Dv);
  SideTensors pre(c), post(c);
  Problem p{c.B, c.N, c.K, c.T, c.S, c.D, c.Dv};
  p.query = heads(query, c.N, c.T, c.D);
  p.key = heads(key, c.K, c.S, c.D);
  p.value = heads(value, c.K, c.S, c.Dv);
  p.pre = pre.side;
  p.post = post.side;
  p.dropout = {c.dropout, 7};
  p.causal = c.causal;
  p.window = c.window;
  p.scale = 0.3f;
  std::vector<char> visible(c.mask == 'b' ? c.T * c.S : 0);
  for (std::size_t i = 0; i < visible.size(); ++i) {
    visible[i] = i % 3 != 0;
  }
  const int64_t copies = c.mask == 'r' ? at::get_num_threads() : 1;
  const auto added = draw(c.mask == 'f' ? c.T * c.S : c.mask == 'r' ? c.T : 0);
  std::vector<float> dadded(copies * added.size());
  Grads grads;
  if (c.mask == 'b') {
    p.mask = {reinterpret_cast<const bool*>(visible.data()), nullptr, {0, 0, c.S, 1}};
  } else if (c.mask == 'f') {
    p.mask = {nullptr, added.data(), {0, 0, c.S, 1}};
    grads.mask = {dadded.data(), p.mask.stride, 0};
  } else if (c.mask == 'r') {
    p.mask = {nullptr, added.data(), {0, 0, 1, 0}};
    grads.mask = {dadded.data(), p.mask.stride, c.T};
  }
  std::vector<float> out(c.B * c.N * c.T * c.Dv), statistics(c.B * c.N * c.T * 2);
  for (std::size_t i = 1; i < statistics.size(); i += 2) {
    statistics[i] = 1;
  }
  forward(p, heads(out, c.N, c.T, c.Dv), statistics.data());
  std::vector<float> dquery(query.size()), dkey(c.B * c.K * c.S * padded(c.D)), dvalue(c.B * c.K * c.S * padded(c.Dv));
  grads.query = heads(dquery, c.N, c.T, c.D);
  grads.key = dkey.data();
  grads.value = dvalue.data();
  grads.pre = pre.grads;
  grads.post = post.grads;
  backward(p, heads(grad_out, c.N, c.T, c.Dv), statistics.data(), grads);
  pre.unpack_grads();
  post.unpack_grads();
  return {out, statistics, dquery, dkey, dvalue, pre.dbase, pre.dquery, pre.dkey, post.dbase, post.dquery, post.dkey, dadded};
}

}  // namespace

int main() {
  const Case cases[] = {
      //                  B  N  K   T    S   D  Dv G  Rq  Rk  base   causal window mask
      {"causal", 1, 4, 4, 130, 130, 8, 8, 1, 2, 2, false, true, 0, ' '},
      {"everything", 2, 6, 3, 65, 129, 5, 7, 2, 2, 1, true, true, 40, 'f', 0.3},
      {"odd", 3, 3, 1, 63, 63, 4, 4, 1, 0, 5, true, false, 9, 'b'},
      {"row mask", 2, 2, 2, 9, 200, 4, 4, 2, -1, 2, false, false, 0, 'r'},
      {"one query", 1, 5, 5, 1, 300, 4, 4, 1, 2, 2, false, true, 0, ' '},
      {"more queries than keys", 1, 2, 2, 70, 33, 4, 4, 1, 2, -1, false, true, 5, ' '},
      {"plain", 2, 2, 1, 33, 70, 4, 4, 1, -1, -1, false, true, 0, ' '},
      {"no rows", 0, 2, 1, 9, 9, 4, 4, 1, 2, 2, true, true, 0, ' '},
      {"no queries", 2, 2, 1, 0, 9, 4, 4, 1, 2, 2, true, true, 0, ' '},
      {"no keys", 1, 2, 2, 3, 0, 4, 4, 1, 2, 2, false, true, 0, ' '},
  };
  bool good = true;
  for (const Case& c : cases) {
    for (const int threads : {1, 3}) {
      at::number_of_threads = threads;
      const auto first = run(c);
      const bool passed = std::all_of(first.begin(), first.end(), all_finite) && first == run(c);
      std::printf("%s, %d threads: %s\n", c.name, threads, passed ? "ok" : "not finite, or not the same again");
      good = good && passed;
    }
  }
  return good ? 0 : 1;
}
