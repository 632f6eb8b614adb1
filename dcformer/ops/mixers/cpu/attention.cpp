// The operators dcformer_cpu::forward and dcformer_cpu::backward: tensors to the plain pointers of problem.h and back.

#include "problem.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <array>
#include <optional>

namespace dcformer {
namespace {

using MaybeTensor = std::optional<at::Tensor>;

at::Tensor rows_contiguous(const at::Tensor& tensor) {
  return tensor.stride(-1) == 1 || tensor.size(-1) == 1 ? tensor : tensor.contiguous();
}

Heads heads(const at::Tensor& tensor) {
  const auto dtype = tensor.scalar_type();
  TORCH_CHECK(dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf, "a tensor is ", dtype);
  const Type type = dtype == at::kBFloat16 ? Type::kBFloat16 : dtype == at::kHalf ? Type::kHalf : Type::kFloat;
  return {static_cast<char*>(tensor.data_ptr()), type, tensor.stride(0), tensor.stride(1), tensor.stride(2)};
}

std::array<int64_t, 4> broadcast_strides(const at::Tensor& mask) {
  std::array<int64_t, 4> strides;
  for (int64_t d = 0; d < 4; ++d) {
    strides[d] = mask.size(d) == 1 ? 0 : mask.stride(d);
  }
  return strides;
}

// One composition, and the tensors that its pointers point into.
struct Composition {
  MaybeTensor base, query, key, packed;
  int64_t groups;

  Composition(const MaybeTensor& base, const MaybeTensor& query, const MaybeTensor& key, int64_t groups) : groups(groups) {
    if (base) {
      this->base = base->to(at::kFloat).contiguous();
    }
    if (query) {
      this->query = query->to(at::kFloat).contiguous();
    }
    if (key) {
      this->key = key->to(at::kFloat);
      packed = at::empty({key->size(0), packed_floats(key->size(1), key->size(3), key->size(2) / 2)}, this->key->options());
      pack(weights(), packed->data_ptr<float>());
    }
  }

  Side side() const {
    return {base ? base->const_data_ptr<float>() : nullptr, query ? query->const_data_ptr<float>() : nullptr,
            packed ? packed->const_data_ptr<float>() : nullptr, query ? query->size(2) / 2 : 0, key ? key->size(2) / 2 : 0, groups};
  }
  Composition zeros() const {
    Composition made = *this;
    for (MaybeTensor* part : {&made.base, &made.query, &made.packed}) {
      if (*part) {
        *part = at::zeros((*part)->sizes(), (*part)->options());
      }
    }
    if (key) {
      made.key = at::empty(key->sizes(), key->options());
    }
    return made;
  }
  SideGrads grads() const {
    const auto data = [](const MaybeTensor& part) { return part ? part->data_ptr<float>() : nullptr; };
    return {data(base), data(query), data(packed)};
  }

  KeyWeights weights() const {
    return {key->data_ptr<float>(), key->size(0), key->size(1), key->size(2), key->size(3),
            {key->stride(0), key->stride(1), key->stride(2), key->stride(3)}};
  }
};

struct Call {
  at::Tensor query, key, value;
  Composition pre, post;
  MaybeTensor mask;
  Problem problem;

  Call(
      const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, Composition pre_, Composition post_,
      const MaybeTensor& mask_, const MaybeTensor& seed, bool is_causal, std::optional<int64_t> window, double scale, double dropout_p)
      : query(rows_contiguous(query)), key(rows_contiguous(key)), value(rows_contiguous(value)), pre(std::move(pre_)), post(std::move(post_)) {
    problem = {query.size(0), query.size(1), key.size(1), query.size(2), key.size(2), query.size(3), value.size(3)};
    problem.query = heads(this->query);
    problem.key = heads(this->key);
    problem.value = heads(this->value);
    problem.pre = pre.side();
    problem.post = post.side();
    if (mask_) {
      const bool is_bool = mask_->scalar_type() == at::kBool;
      mask = is_bool ? *mask_ : mask_->to(at::kFloat);
      problem.mask = {is_bool ? mask->const_data_ptr<bool>() : nullptr, is_bool ? nullptr : mask->const_data_ptr<float>(),
                      broadcast_strides(*mask)};
    }
    if (seed) {
      problem.dropout = {dropout_p, static_cast<uint64_t>(seed->item<int64_t>())};
    }
    problem.causal = is_causal;
    problem.window = window.value_or(0);
    problem.scale = static_cast<float>(scale);
  }
};

std::tuple<at::Tensor, at::Tensor> forward_op(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const MaybeTensor& pre_base,
    const MaybeTensor& pre_query, const MaybeTensor& pre_key, const MaybeTensor& post_base, const MaybeTensor& post_query,
    const MaybeTensor& post_key, const MaybeTensor& mask, const MaybeTensor& seed, int64_t pre_groups, int64_t post_groups,
    bool is_causal, std::optional<int64_t> window, double scale, double dropout_p) {
  const Call call(query, key, value, {pre_base, pre_query, pre_key, pre_groups}, {post_base, post_query, post_key, post_groups}, mask,
                  seed, is_causal, window, scale, dropout_p);
  const Problem& p = call.problem;
  const at::Tensor out = at::zeros({p.B, p.N, p.T, p.Dv}, query.options());
  const at::Tensor statistics = at::zeros({p.B, p.N, p.T, 2}, query.options().dtype(at::kFloat));
  statistics.select(3, 1).fill_(1);
  forward(p, heads(out), statistics.data_ptr<float>());
  return {out, statistics};
}

std::vector<at::Tensor> backward_op(
    const at::Tensor& grad_out, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const MaybeTensor& pre_base,
    const MaybeTensor& pre_query, const MaybeTensor& pre_key, const MaybeTensor& post_base, const MaybeTensor& post_query,
    const MaybeTensor& post_key, const MaybeTensor& mask, const MaybeTensor& seed, const at::Tensor& statistics,
    bool mask_needs_grad, int64_t pre_groups, int64_t post_groups, bool is_causal, std::optional<int64_t> window, double scale,
    double dropout_p) {
  const Call call(query, key, value, {pre_base, pre_query, pre_key, pre_groups}, {post_base, post_query, post_key, post_groups}, mask,
                  seed, is_causal, window, scale, dropout_p);
  const Problem& p = call.problem;
  const at::Tensor dout = rows_contiguous(grad_out);
  const auto floats = query.options().dtype(at::kFloat);
  const at::Tensor dquery = at::zeros({p.B, p.N, p.T, p.D}, floats);
  const at::Tensor dkey = at::zeros({p.B, p.K, p.S, padded(p.D)}, floats), dvalue = at::zeros({p.B, p.K, p.S, padded(p.Dv)}, floats);
  Composition dpre = call.pre.zeros(), dpost = call.post.zeros();
  Grads grads{heads(dquery), dkey.data_ptr<float>(), dvalue.data_ptr<float>(), dpre.grads(), dpost.grads()};
  at::Tensor dmask;
  if (mask_needs_grad) {
    const bool one_for_all_keys = mask->size(3) == 1;  // then every task has a copy
    const int64_t copies = one_for_all_keys ? at::get_num_threads() : 1;
    std::vector<int64_t> sizes = mask->sizes().vec();
    sizes.insert(sizes.begin(), copies);
    dmask = at::zeros(sizes, floats);
    grads.mask = {dmask.data_ptr<float>(), broadcast_strides(dmask.select(0, 0)), one_for_all_keys ? dmask.stride(0) : 0};
  }
  backward(p, heads(dout), statistics.const_data_ptr<float>(), grads);
  std::vector<at::Tensor> out{dquery, dkey.narrow(3, 0, p.D).contiguous(), dvalue.narrow(3, 0, p.Dv).contiguous()};
  for (Composition* side : {&dpre, &dpost}) {
    if (side->key) {
      unpack(side->packed->const_data_ptr<float>(), side->weights());
    }
    for (const MaybeTensor& part : {side->base, side->query, side->key}) {
      if (part) {
        out.push_back(*part);
      }
    }
  }
  if (mask_needs_grad) {
    out.push_back(dmask.sum(0));
  }
  return out;
}

}  // namespace
}  // namespace dcformer

TORCH_LIBRARY(dcformer_cpu, m) {
  m.def(
      "forward(Tensor query, Tensor key, Tensor value, Tensor? pre_base, Tensor? pre_query, Tensor? pre_key, Tensor? post_base, "
      "Tensor? post_query, Tensor? post_key, Tensor? mask, Tensor? seed, int pre_groups, int post_groups, bool is_causal, "
      "int? window, float scale, float dropout_p) -> (Tensor, Tensor)");
  m.def(
      "backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor? pre_base, Tensor? pre_query, Tensor? pre_key, "
      "Tensor? post_base, Tensor? post_query, Tensor? post_key, Tensor? mask, Tensor? seed, Tensor statistics, "
      "bool mask_needs_grad, int pre_groups, int post_groups, bool is_causal, int? window, float scale, float dropout_p) "
      "-> Tensor[]");
}

TORCH_LIBRARY_IMPL(dcformer_cpu, CPU, m) {
  m.impl("forward", dcformer::forward_op);
  m.impl("backward", dcformer::backward_op);
}
