#include "tensor.hpp"

namespace {

// The parts of dlpack.h (version 1.x) that are needed here.
struct DLDevice { int32_t type, id; };
struct DLDataType { uint8_t code, bits; uint16_t lanes; };
struct DLTensor {
  void* data;
  DLDevice device;
  int32_t ndim;
  DLDataType dtype;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};
struct DLExchange {
  struct { uint32_t major, minor; } version;
  void* previous;
  void *allocate, *managed_from_object, *managed_to_object;
  int (*tensor_from_object)(void* object, DLTensor* out);
  void* stream;
};

constexpr int32_t kDLCPU = 1;

Kind kind_of(DLDataType t) {
  if (t.lanes != 1) return Kind::kOther;
  if (t.code == 2 && t.bits == 32) return Kind::kFloat32;
  if (t.code == 4 && t.bits == 16) return Kind::kBFloat16;
  if (t.code == 2 && t.bits == 64) return Kind::kFloat64;
  if (t.code == 0 && t.bits == 32) return Kind::kInt32;
  if (t.code == 0 && t.bits == 64) return Kind::kInt64;
  if (t.code == 1 && t.bits == 8) return Kind::kUInt8;
  if (t.code == 0 && t.bits == 8) return Kind::kInt8;
  if (t.code == 10 && t.bits == 8) return Kind::kFloat8E4M3;
  if (t.code == 12 && t.bits == 8) return Kind::kFloat8E5M2;
  return Kind::kOther;
}

const DLExchange* exchange_of(PyTypeObject* type) {
  static PyTypeObject* known_type = nullptr;
  static const DLExchange* known = nullptr;
  if (type == known_type) return known;
  const DLExchange* found = nullptr;
  nb::object capsule = nb::getattr(nb::handle((PyObject*)type), "__dlpack_c_exchange_api__", nb::none());
  if (!capsule.is_none()) {
    found = static_cast<const DLExchange*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
    if (!found) PyErr_Clear();
    if (found && (found->version.major != 1 || !found->tensor_from_object)) found = nullptr;
  }
  known_type = type;
  known = found;
  return found;
}

Kind kind_of(const std::string& name) {
  if (name == "torch.float32") return Kind::kFloat32;
  if (name == "torch.bfloat16") return Kind::kBFloat16;
  if (name == "torch.float64") return Kind::kFloat64;
  if (name == "torch.int32") return Kind::kInt32;
  if (name == "torch.int64") return Kind::kInt64;
  if (name == "torch.uint8") return Kind::kUInt8;
  if (name == "torch.int8") return Kind::kInt8;
  if (name == "torch.float8_e4m3fn") return Kind::kFloat8E4M3;
  if (name == "torch.float8_e5m2") return Kind::kFloat8E5M2;
  return Kind::kOther;
}

Tensor slow_view(nb::handle object, const char* name) {
  if (!nb::hasattr(object, "data_ptr")) throw nb::type_error((std::string(name) + " must be a torch tensor").c_str());
  if (nb::cast<std::string>(nb::str(object.attr("device").attr("type"))) != "cpu")
    throw nb::type_error((std::string(name) + " must be a CPU tensor").c_str());
  Tensor t;
  t.data = reinterpret_cast<char*>(nb::cast<uintptr_t>(object.attr("data_ptr")()));
  t.kind = kind_of(nb::cast<std::string>(nb::str(object.attr("dtype"))));
  nb::tuple shape(object.attr("shape")), strides(object.attr("stride")());
  t.dims = int(nb::len(shape));
  require(t.dims <= kMaxDims, name, "has too many dimensions");
  for (int i = 0; i < t.dims; ++i) {
    t.shape[i] = nb::cast<int64_t>(shape[i]);
    t.stride[i] = nb::cast<int64_t>(strides[i]);
  }
  return t;
}

}  // namespace

void require(bool condition, const char* name, const char* message) {
  if (!condition) throw nb::value_error((std::string(name) + " " + message).c_str());
}

Tensor view(nb::handle object, const char* name) {
  const DLExchange* exchange = exchange_of(Py_TYPE(object.ptr()));
  if (!exchange) return slow_view(object, name);
  DLTensor raw;
  if (exchange->tensor_from_object(object.ptr(), &raw) != 0) {
    PyErr_Clear();
    return slow_view(object, name);
  }
  if (raw.device.type != kDLCPU) throw nb::type_error((std::string(name) + " must be a CPU tensor").c_str());
  require(raw.ndim <= kMaxDims, name, "has too many dimensions");
  Tensor t;
  t.data = static_cast<char*>(raw.data) + raw.byte_offset;
  t.kind = kind_of(raw.dtype);
  t.dims = raw.ndim;
  int64_t dense = 1;
  for (int i = raw.ndim - 1; i >= 0; --i) {
    t.shape[i] = raw.shape[i];
    t.stride[i] = raw.strides ? raw.strides[i] : dense;
    dense *= raw.shape[i];
  }
  return t;
}

Tensor view(nb::handle object, const char* name, int dims) {
  Tensor t = view(object, name);
  if (t.dims != dims)
    throw nb::value_error((std::string(name) + " must have " + std::to_string(dims) + " dimensions, not " + std::to_string(t.dims)).c_str());
  return t;
}

Tensor view(nb::handle object, const char* name, int dims, Kind kind) {
  Tensor t = view(object, name, dims);
  if (t.kind != kind) {
    static const char* const names[] = {"float32", "bfloat16", "float64", "int32", "int64", "uint8", "int8", "float8_e4m3fn", "float8_e5m2", "?"};
    throw nb::type_error((std::string(name) + " must be " + names[int(kind)]).c_str());
  }
  return t;
}

DType float_type(const Tensor& t, const char* name) {
  if (t.kind == Kind::kFloat32) return DType::kFloat32;
  if (t.kind == Kind::kBFloat16) return DType::kBFloat16;
  throw nb::type_error((std::string(name) + " must be float32 or bfloat16").c_str());
}

Rows as_rows(const Tensor& t, const char* name) {
  const NestedRows r = as_nested_rows(t, name);
  require(r.outer_stride == r.inner_stride * r.inner_count, name, "has leading dimensions that are not rows of one stride");
  return Rows{r.data, r.rows, r.width, r.inner_stride};
}

NestedRows as_nested_rows(const Tensor& t, const char* name) {
  require(t.dims >= 1, name, "must have at least one dimension");
  const int last = t.dims - 1;
  require(t.stride[last] == 1 || t.shape[last] <= 1, name, "must be contiguous in its last dimension");
  if (t.numel() == 0) return NestedRows{t.data, 0, t.shape[last], 1, t.shape[last] * t.item(), t.shape[last] * t.item()};
  int64_t count[2] = {1, 1}, stride[2] = {t.shape[last], 0};
  int level = -1;
  for (int i = last - 1; i >= 0; --i) {
    if (t.shape[i] == 1) continue;
    if (level >= 0 && t.stride[i] == stride[level] * count[level]) {
      count[level] *= t.shape[i];
      continue;
    }
    require(++level < 2, name, "has leading dimensions of more than two strides");
    count[level] = t.shape[i];
    stride[level] = t.stride[i];
  }
  if (level < 1) stride[1] = stride[0] * count[0];
  return NestedRows{t.data, count[0] * count[1], t.shape[last], count[0] ? count[0] : 1, stride[0] * t.item(), stride[1] * t.item()};
}
