// Packed weights as Python sees them, and the checked arguments of what may go before a product.
#pragma once
#include <nanobind/nanobind.h>

#include <memory>
#include <string>

#include "drivers.hpp"
#include "tape.hpp"
#include "tensor.hpp"

// `out` is for the caller to set; `residual` may be null.
inline NormArgs norm_args(const Tensor& x, const Tensor* residual, nb::handle weight_object, double eps, int64_t* rows) {
  const Tensor weight = view(weight_object, "weight", 1);
  const NestedRows in = as_nested_rows(x, "x");
  require(weight.shape[0] == in.width && weight.contiguous(), "weight", "must be contiguous, one value a feature");
  NormArgs a{in.data, in.inner_stride, in.inner_count, in.outer_stride, nullptr, 0, weight.data, nullptr, in.width,
             float(eps), float_type(x, "x"), float_type(weight, "weight")};
  if (residual) {
    const Rows r = as_rows(*residual, "residual");
    require(r.rows == in.rows && r.width == in.width, "residual", "must have x's shape");
    a.residual = r.data;
    a.residual_stride = r.stride;
  }
  *rows = in.rows;
  return a;
}

inline GateArgs gate_args(const Tensor& x, int kind, int64_t* rows) {
  const Rows in = as_rows(x, "x");
  require(in.width % 2 == 0, "x", "must have an even number of features");
  require(kind >= 0 && kind <= 2, "kind", "is unknown");
  *rows = in.rows;
  return GateArgs{in.data, in.stride, nullptr, in.width / 2, Activation(kind), float_type(x, "x")};
}

class Linear {
 public:
  Linear(Pool& pool, const Isa& isa, Arena& arena, const Desk& desk, nb::handle weight, nb::handle bias)
      : pool_(pool), isa_(isa), desk_(desk) {
    const Tensor w = view(weight, "weight", 2);
    const DType dtype = float_type(w, "weight");
    require(w.shape[0] > 0 && w.shape[1] > 0, "weight", "must not be empty");
    require(w.stride[1] == 1 || w.shape[1] == 1, "weight", "must be contiguous in its last dimension");
    packed_ = std::make_unique<PackedWeight>(arena, w.shape[0], w.shape[1], dtype);
    if (!bias.is_none()) {
      const Tensor b = view(bias, "bias", 1, Kind::kFloat32);
      require(b.shape[0] == w.shape[0] && b.contiguous(), "bias", "must be contiguous, one value for each output");
      packed_->bias.assign(b.as<float>(), b.as<float>() + b.shape[0]);
    }
    nb::gil_scoped_release release;
    packed_->pack(pool_, w.data, w.stride[0] * w.item());
  }

  void run(nb::handle x_object, nb::handle y_object) const {
    const Tensor x = view(x_object, "x"), y = view(y_object, "y");
    const Rows in = as_rows(x, "x"), out = as_rows(y, "y");
    const PackedWeight& w = *packed_;
    require(in.width == w.K, "x", "has the wrong number of features");
    require(out.width == w.N && out.rows == in.rows, "y", "has the wrong shape");
    const DType dtype = float_type(x, "x");
    if (dtype != w.dtype) throw nb::type_error("x must have the weight's dtype");
    require(y.kind == Kind::kFloat32 || y.kind == x.kind, "y", "must be float32 or have x's dtype");
    const bool y_float32 = y.kind == Kind::kFloat32;
    desk_.put([this, in, out, y_float32] { run_linear(pool_, isa_, *packed_, in.data, in.stride, in.rows, out.data, out.stride, y_float32); });
  }

  void rows(nb::handle ids_object, nb::handle out_object) const {
    const Tensor ids = view(ids_object, "ids"), out = view(out_object, "out");
    require(ids.kind == Kind::kInt64 && ids.contiguous(), "ids", "must be contiguous int64");
    require(out.contiguous() && out.numel() == ids.numel() * packed_->K, "out", "has the wrong shape");
    require(float_type(out, "out") == packed_->dtype, "out", "must have the weight's dtype");
    desk_.put([this, ids, out] { packed_->rows(pool_, ids.as<int64_t>(), ids.numel(), out.data); });
  }

  int64_t in_features() const { return packed_->K; }
  int64_t out_features() const { return packed_->N; }
  int64_t nbytes() const { return packed_->bytes() + int64_t(packed_->bias.size() * 4); }

 private:
  Pool& pool_;
  const Isa& isa_;
  const Desk& desk_;
  std::unique_ptr<PackedWeight> packed_;
};

class QuantLinear {
 public:
  QuantLinear(Pool& pool, const Isa& isa, Arena& arena, const Desk& desk, const std::string& scheme, nb::handle blocks, int64_t inputs,
              nb::handle bias)
      : pool_(pool), isa_(isa), desk_(desk) {
    const Tensor w = view(blocks, "blocks", 2, Kind::kUInt8);
    require(w.shape[0] > 0 && inputs > 0 && inputs % kBlock == 0, "blocks", "must hold whole blocks of 32 inputs");
    packed_ = std::make_unique<QuantWeight>(arena, scheme, w.shape[0], inputs);
    require(w.shape[1] == packed_->row_bytes && w.stride[1] == 1, "blocks", "has rows of another size");
    if (!bias.is_none()) {
      const Tensor b = view(bias, "bias", 1, Kind::kFloat32);
      require(b.shape[0] == w.shape[0] && b.contiguous(), "bias", "must be contiguous, one value for each output");
      packed_->bias.assign(b.as<float>(), b.as<float>() + b.shape[0]);
    }
    nb::gil_scoped_release release;
    packed_->pack(pool_, w.data, w.stride[0]);
  }

  void run(nb::handle x_object, nb::handle y_object) const {
    const Tensor x = view(x_object, "x"), y = view(y_object, "y");
    const Rows in = as_rows(x, "x"), out = as_rows(y, "y");
    require(in.width == packed_->K, "x", "has the wrong number of features");
    require(out.width == packed_->N && out.rows == in.rows, "y", "has the wrong shape");
    const DType x_type = float_type(x, "x");
    const Product to{out.data, out.stride, float_type(y, "y"), in.rows};
    desk_.put([this, in, to, x_type] { run_quant(pool_, isa_, *packed_, in.data, in.stride, x_type, to); });
  }

  // The product of what a norm or an activation gives, which goes from registers to bytes and is stored nowhere else.
  void run_normed(nb::handle x_object, nb::handle residual_object, nb::handle weight, double eps, nb::handle y_object) const {
    const Tensor x = view(x_object, "x");
    Tensor residual;
    if (!residual_object.is_none()) {
      residual = view(residual_object, "residual");
      require(residual.kind == x.kind, "residual", "must have x's dtype");
    }
    int64_t rows;
    const NormArgs a = norm_args(x, residual_object.is_none() ? nullptr : &residual, weight, eps, &rows);
    require(a.E == packed_->K, "x", "has the wrong number of features");
    const Product to = product(y_object, rows);
    desk_.put([this, a, to] { run_quant_norm(pool_, isa_, *packed_, a, to); });
  }

  void run_gated(nb::handle x_object, int kind, nb::handle y_object) const {
    int64_t rows;
    const GateArgs a = gate_args(view(x_object, "x"), kind, &rows);
    require(a.F == packed_->K, "x", "has the wrong number of features");
    const Product to = product(y_object, rows);
    desk_.put([this, a, to] { run_quant_gate(pool_, isa_, *packed_, a, to); });
  }

  void rows(nb::handle ids_object, nb::handle out_object) const {
    const Tensor ids = view(ids_object, "ids"), out = view(out_object, "out");
    require(ids.kind == Kind::kInt64 && ids.contiguous(), "ids", "must be contiguous int64");
    require(out.contiguous() && out.numel() == ids.numel() * packed_->K, "out", "has the wrong shape");
    const DType dtype = float_type(out, "out");
    desk_.put([this, ids, out, dtype] { packed_->rows(pool_, ids.as<int64_t>(), ids.numel(), out.data, dtype); });
  }

  int64_t in_features() const { return packed_->K; }
  int64_t out_features() const { return packed_->N; }
  int64_t nbytes() const { return packed_->bytes() + int64_t(packed_->bias.size() * 4); }

 private:
  Product product(nb::handle object, int64_t rows) const {
    const Tensor y = view(object, "y");
    const Rows out = as_rows(y, "y");
    require(out.width == packed_->N && out.rows == rows, "y", "has the wrong shape");
    return Product{out.data, out.stride, float_type(y, "y"), rows};
  }

  Pool& pool_;
  const Isa& isa_;
  const Desk& desk_;
  std::unique_ptr<QuantWeight> packed_;
};
