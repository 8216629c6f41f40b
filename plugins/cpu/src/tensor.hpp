// A look at a torch tensor without owning it, through the DLPack exchange table that torch publishes on its tensor type
// (about 30 ns, no Python call), or through the tensor's own methods where that table is missing.
#pragma once
#include <nanobind/nanobind.h>

#include <cstdint>
#include <string>

#include "kernels.hpp"

namespace nb = nanobind;

constexpr int kMaxDims = 6;

enum class Kind { kFloat32, kBFloat16, kFloat64, kInt32, kInt64, kUInt8, kInt8, kFloat8E4M3, kFloat8E5M2, kOther };

struct Tensor {
  char* data = nullptr;
  int dims = 0;
  Kind kind = Kind::kOther;
  int64_t shape[kMaxDims] = {};
  int64_t stride[kMaxDims] = {};  // elements

  int64_t numel() const {
    int64_t n = 1;
    for (int i = 0; i < dims; ++i) n *= shape[i];
    return n;
  }
  int64_t item() const {
    switch (kind) {
      case Kind::kUInt8: case Kind::kInt8: case Kind::kFloat8E4M3: case Kind::kFloat8E5M2: return 1;
      case Kind::kBFloat16: return 2;
      case Kind::kInt64: case Kind::kFloat64: return 8;
      default: return 4;
    }
  }
  bool contiguous() const {
    int64_t expected = 1;
    for (int i = dims - 1; i >= 0; --i) {
      if (shape[i] != 1 && stride[i] != expected) return false;
      expected *= shape[i];
    }
    return true;
  }
  template <class T> T* as() const { return reinterpret_cast<T*>(data); }
};

// Raises TypeError for anything but a dense CPU tensor of at most kMaxDims dimensions.
Tensor view(nb::handle object, const char* name);

// What follows raises ValueError or TypeError that names the argument.
Tensor view(nb::handle object, const char* name, int dims);
Tensor view(nb::handle object, const char* name, int dims, Kind kind);
DType float_type(const Tensor& t, const char* name);
void require(bool condition, const char* name, const char* message);

// Any leading dimensions as rows of the last one: [rows, width] with one stride. Raises when they cannot be.
struct Rows {
  char* data;
  int64_t rows, width, stride;  // stride in bytes
};
Rows as_rows(const Tensor& t, const char* name);

// The same, with a second stride: rows t = outer * inner_count + inner.
struct NestedRows {
  char* data;
  int64_t rows, width, inner_count, inner_stride, outer_stride;  // strides in bytes
};
NestedRows as_nested_rows(const Tensor& t, const char* name);
