// The Python face of the kernels. Every function checks shapes and types before a pointer is followed, and lets go of
// the interpreter while it works.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <utility>

#include "drivers.hpp"
#include "products.hpp"
#include "tape.hpp"
#include "tensor.hpp"

namespace {

using Pairs = std::vector<std::pair<int64_t, int64_t>>;

// A cache under activations of `dtype`; `what` are the activations' names.
CacheView cache_view(nb::handle object, int head_size, DType dtype, const char* name, const char* what) {
  const Tensor t = view(object, name);
  CacheView c;
  c.dtype = dtype;
  switch (t.kind) {
    case Kind::kInt8: c.stored = Stored::kInt8; break;
    case Kind::kFloat8E4M3: c.stored = Stored::kE4M3; break;
    case Kind::kFloat8E5M2: c.stored = Stored::kE5M2; break;
    default:
      c.stored = Stored::kPlain;
      require(float_type(t, name) == dtype, what, "must have the cache's dtype");
  }
  const bool scaled = c.stored == Stored::kInt8;
  require(t.dims == (scaled ? 4 : 5) && t.contiguous() && t.shape[1] == 2, name,
          scaled ? "must be a contiguous [blocks, 2, kv heads, block size * (padded head size + 4)]"
                 : "must be a contiguous [blocks, 2, kv heads, block size, padded head size]");
  c.data = t.data;
  c.num_blocks = t.shape[0];
  c.kv_heads = int(t.shape[2]);
  c.head_size = head_size;
  const int padded = (head_size + kPanel - 1) / kPanel * kPanel;
  c.block_size = int(scaled ? t.shape[3] / (padded + 4) : t.shape[3]);
  c.padded = int(scaled ? t.shape[3] % (padded + 4) ? 0 : padded : t.shape[4]);
  require(c.stored == Stored::kPlain || head_size <= 1024, name, "of bytes must have a head size up to 1024");
  require(c.block_size == 8 || (c.block_size > 0 && c.block_size % kPanel == 0), name, "must have a block size of 8 or a multiple of 16");
  require(c.padded == padded, name, "was laid out for another head size");
  return c;
}

void require_heads(const Tensor& t, const char* name) {
  require(t.stride[2] == 1 || t.shape[2] == 1, name, "must be contiguous in its last dimension");
}

class Kernels {
 public:
  Kernels(int threads, const std::string& isa) : isa_(*choose_isa(isa.c_str())), pool_(threads) {}

  const char* isa() const { return isa_.name; }
  int threads() const { return pool_.threads(); }

  Linear* linear(nb::handle weight, nb::handle bias) { return new Linear(pool_, isa_, arena_, desk_, weight, bias); }

  QuantLinear* quant_linear(const std::string& scheme, nb::handle blocks, int64_t inputs, nb::handle bias) {
    return new QuantLinear(pool_, isa_, arena_, desk_, scheme, blocks, inputs, bias);
  }

  // From now on calls are written down and not made.
  void start_tape() { desk_.start(); }
  size_t taped() const { return desk_.tape ? desk_.tape->size() : 0; }
  std::shared_ptr<Tape> end_tape() { return std::exchange(desk_.tape, nullptr); }

  void rms_norm(nb::handle x_object, nb::handle weight_object, nb::handle out_object, double eps) {
    norm(view(x_object, "x"), nullptr, weight_object, out_object, eps);
  }

  void add_rms_norm(nb::handle x_object, nb::handle residual_object, nb::handle weight_object, nb::handle out_object, double eps) {
    const Tensor x = view(x_object, "x"), residual = view(residual_object, "residual");
    require(residual.kind == x.kind, "residual", "must have x's dtype");
    norm(x, &residual, weight_object, out_object, eps);
  }

  void rotary(nb::handle positions_object, nb::handle q_object, nb::handle k_object, nb::handle table_object, bool interleaved) {
    const Tensor positions = view(positions_object, "positions", 1, Kind::kInt64);
    const Tensor q = view(q_object, "query", 3), table = view(table_object, "cos_sin", 2, Kind::kFloat32);
    require(positions.contiguous() && positions.shape[0] == q.shape[0], "positions", "must be contiguous, one a token");
    require(table.shape[1] % 2 == 0 && table.shape[1] <= q.shape[2] && (table.stride[1] == 1 || table.shape[1] <= 1), "cos_sin",
            "must be [positions, N], N even and at most the head size");
    require_heads(q, "query");
    RotaryArgs a{};
    a.dtype = float_type(q, "query");
    a.q = q.data;
    a.q_token = q.stride[0] * q.item();
    a.q_head = q.stride[1] * q.item();
    a.q_heads = int(q.shape[1]);
    if (!k_object.is_none()) {
      const Tensor k = view(k_object, "key", 3);
      require(k.kind == q.kind && k.shape[0] == q.shape[0] && k.shape[2] == q.shape[2], "key", "must match query");
      require_heads(k, "key");
      a.k = k.data;
      a.k_token = k.stride[0] * k.item();
      a.k_head = k.stride[1] * k.item();
      a.k_heads = int(k.shape[1]);
    }
    a.half = int(table.shape[1] / 2);
    a.cos_sin = table.as<float>();
    a.cos_sin_stride = table.stride[0];
    a.positions = positions.as<int64_t>();
    a.interleaved = interleaved;
    const int64_t tokens = q.shape[0], known = table.shape[0];
    desk_.put([this, a, tokens, known] { run_rotary(pool_, isa_, a, tokens, known); });
  }

  void gate(nb::handle x_object, nb::handle out_object, int kind) {
    const Tensor x = view(x_object, "x"), out = view(out_object, "out");
    int64_t rows;
    GateArgs a = gate_args(x, kind, &rows);
    require(out.contiguous() && out.kind == x.kind && out.numel() == rows * a.F, "out", "has the wrong shape");
    a.out = out.data;
    desk_.put([this, a, rows] { run_gate(pool_, isa_, a, rows); });
  }

  void lora_shrink(nb::handle x_object, nb::handle a_object, nb::handle adapter_object, nb::handle h_object) {
    const Tensor x = view(x_object, "x", 2), a = view(a_object, "a", 4), h = view(h_object, "h", 3, Kind::kFloat32);
    const Tensor adapter = view(adapter_object, "adapter", 1, Kind::kInt64);
    LoraShrinkArgs args{};
    args.dtype = float_type(x, "x");
    require(a.kind == x.kind && a.contiguous() && a.shape[3] == x.shape[1], "a", "must be a contiguous [S, N, R, inputs] of x's dtype");
    require(x.stride[1] == 1 || x.shape[1] <= 1, "x", "must be contiguous in its last dimension");
    require(adapter.contiguous() && adapter.shape[0] == x.shape[0], "adapter", "must be contiguous, one a token");
    require(h.contiguous() && h.shape[0] == a.shape[0] && h.shape[1] == x.shape[0] && h.shape[2] == a.shape[2], "h",
            "must be a contiguous [S, tokens, R]");
    args.x = x.data;
    args.x_stride = x.stride[0] * x.item();
    args.a = a.data;
    args.adapter = adapter.as<int64_t>();
    args.h = h.as<float>();
    args.T = x.shape[0], args.S = a.shape[0], args.N = a.shape[1], args.R = a.shape[2], args.I = a.shape[3];
    desk_.put([this, args] { run_lora_shrink(pool_, isa_, args); });
  }

  // `h` and `b` are those of one slice, whose columns of y begin at `start`.
  void lora_expand(nb::handle h_object, nb::handle b_object, nb::handle adapter_object, nb::handle y_object, int64_t start) {
    const Tensor h = view(h_object, "h", 2, Kind::kFloat32), b = view(b_object, "b", 3), y = view(y_object, "y", 2);
    const Tensor adapter = view(adapter_object, "adapter", 1, Kind::kInt64);
    LoraExpandArgs args{};
    args.dtype = float_type(y, "y");
    require(b.kind == y.kind && b.contiguous() && b.shape[2] == h.shape[1], "b", "must be a contiguous [N, outputs, R] of y's dtype");
    require(h.contiguous() && h.shape[0] == y.shape[0], "h", "must be a contiguous [tokens, R]");
    require(adapter.contiguous() && adapter.shape[0] == y.shape[0], "adapter", "must be contiguous, one a token");
    require(y.stride[1] == 1 || y.shape[1] <= 1, "y", "must be contiguous in its last dimension");
    require(start >= 0 && start + b.shape[1] <= y.shape[1], "start", "must leave room for the slice's outputs in y");
    args.h = h.as<float>();
    args.b = b.data;
    args.adapter = adapter.as<int64_t>();
    args.y = y.data + start * y.item();
    args.y_stride = y.stride[0] * y.item();
    args.T = y.shape[0], args.N = b.shape[0], args.P = b.shape[1], args.R = b.shape[2];
    desk_.put([this, args] { run_lora_expand(pool_, isa_, args); });
  }

  void cache_write(nb::handle k_object, nb::handle v_object, nb::handle cache_object, nb::handle slots_object) {
    const Tensor k = view(k_object, "key", 3), v = view(v_object, "value", 3), slots = view(slots_object, "slot_mapping", 1, Kind::kInt64);
    const CacheView cache = cache_view(cache_object, int(k.shape[2]), float_type(k, "key"), "kv_cache", "key and value");
    require(k.kind == v.kind, "key and value", "must have one dtype");
    require(k.shape[1] == cache.kv_heads && v.shape[1] == cache.kv_heads, "key and value", "must have the cache's number of heads");
    require(v.shape[2] == k.shape[2] && v.shape[0] == k.shape[0], "value", "must have key's shape");
    require(slots.shape[0] <= k.shape[0] && slots.contiguous(), "slot_mapping", "must be contiguous, at most one slot a token");
    require_heads(k, "key");
    require_heads(v, "value");
    const CacheWriteArgs a{k.data, v.data, k.stride[0] * k.item(), k.stride[1] * k.item(), v.stride[0] * v.item(),
                           v.stride[1] * v.item(), cache, slots.as<int64_t>()};
    const int64_t tokens = slots.shape[0];
    desk_.put([this, a, tokens] { run_cache_write(pool_, isa_, a, tokens, water_); });
  }

  void attention(nb::handle q_object, nb::handle cache_object, nb::handle starts_object, nb::handle lens_object,
                 nb::handle table_object, nb::handle out_object, double scale, double soft_cap, int64_t window,
                 nb::handle sinks_object, nb::handle alibi_object, bool causal) {
    const Tensor q = view(q_object, "query", 3), out = view(out_object, "out", 3);
    const Tensor starts = view(starts_object, "query_start_loc", 1, Kind::kInt32), lens = view(lens_object, "seq_lens", 1, Kind::kInt32);
    const Tensor table = view(table_object, "block_table", 2, Kind::kInt32);
    AttentionArgs a{};
    a.cache = cache_view(cache_object, int(q.shape[2]), float_type(q, "query"), "kv_cache", "query and out");
    require(out.kind == q.kind, "query and out", "must have one dtype");
    require(q.shape[1] % a.cache.kv_heads == 0, "query", "must have a multiple of the cache's heads");
    require(out.shape[0] == q.shape[0] && out.shape[1] == q.shape[1] && out.shape[2] == q.shape[2], "out", "must have query's shape");
    require(starts.contiguous() && lens.contiguous() && starts.shape[0] >= lens.shape[0] + 1, "query_start_loc", "must be one longer than seq_lens");
    require(table.shape[0] >= lens.shape[0] && (table.stride[1] == 1 || table.shape[1] <= 1), "block_table", "must have one contiguous row a sequence");
    require_heads(q, "query");
    require_heads(out, "out");
    a.q = q.data;
    a.q_token = q.stride[0] * q.item();
    a.q_head = q.stride[1] * q.item();
    a.out = out.data;
    a.out_token = out.stride[0] * out.item();
    a.out_head = out.stride[1] * out.item();
    a.query_start = starts.as<int32_t>();
    a.seq_lens = lens.as<int32_t>();
    a.table = table.as<int32_t>();
    a.table_stride = table.stride[0];
    a.group = int(q.shape[1] / a.cache.kv_heads);
    a.scale = float(scale);
    a.soft_cap = float(soft_cap);
    a.window = window;
    a.sinks = per_head(sinks_object, "sinks", q.shape[1]);
    a.alibi = per_head(alibi_object, "alibi_slopes", q.shape[1]);
    a.causal = causal;
    const AttentionBatch batch{lens.shape[0], q.shape[0], table.shape[1], q.shape[1]};
    desk_.put([this, a, batch] { run_attention(pool_, isa_, a, batch); });
  }

  void copy_blocks(const std::vector<nb::object>& sources, const std::vector<nb::object>& targets, const Pairs& pairs) {
    desk_.refuse("copying blocks");
    require(sources.size() == targets.size(), "src and dst", "must have as many caches");
    struct Side { char *from, *to; int64_t bytes; };
    std::vector<Side> sides;
    for (size_t i = 0; i < sources.size(); ++i) {
      const Tensor s = view(sources[i], "src"), d = view(targets[i], "dst");
      require(s.dims >= 1 && d.dims >= 1 && s.contiguous() && d.contiguous() && s.kind == d.kind, "src and dst", "must be contiguous and of one dtype");
      const int64_t bytes = s.shape[0] ? s.numel() / s.shape[0] * s.item() : 0;
      require(d.shape[0] == 0 || d.numel() / d.shape[0] * d.item() == bytes, "src and dst", "must have blocks of one size");
      for (const auto& [from, to] : pairs)
        if (from < 0 || from >= s.shape[0] || to < 0 || to >= d.shape[0])
          throw nb::index_error(("block pair (" + std::to_string(from) + ", " + std::to_string(to) + ") is outside the cache").c_str());
      sides.push_back(Side{s.data, d.data, bytes});
    }
    nb::gil_scoped_release release;
    Pieces pieces(int64_t(sides.size()), pool_.threads(), 1);
    pool_.run([&](int) {
      for (int64_t begin, end; pieces.next(&begin, &end);)
        for (int64_t i = begin; i < end; ++i)
          for (const auto& [from, to] : pairs)
            std::memmove(sides[size_t(i)].to + to * sides[size_t(i)].bytes, sides[size_t(i)].from + from * sides[size_t(i)].bytes, size_t(sides[size_t(i)].bytes));
    });
  }

  void sample(nb::handle logits_object, nb::handle temperature, nb::handle top_k, nb::handle top_p, nb::handle min_p,
              nb::handle uniform, nb::handle ids_object) {
    desk_.refuse("sampling");
    const Tensor logits = view(logits_object, "logits", 2, Kind::kFloat32);
    require(logits.shape[1] > 0 && (logits.stride[1] == 1 || logits.shape[1] == 1), "logits", "must have contiguous rows");
    SampleArgs a{};
    a.logits = logits.as<float>();
    a.stride = logits.stride[0];
    a.rows = logits.shape[0];
    a.vocab = logits.shape[1];
    a.temperature = column<float>(temperature, "temperature", Kind::kFloat32, a.rows);
    a.top_k = column<int64_t>(top_k, "top_k", Kind::kInt64, a.rows);
    a.top_p = column<float>(top_p, "top_p", Kind::kFloat32, a.rows);
    a.min_p = column<float>(min_p, "min_p", Kind::kFloat32, a.rows);
    a.uniform = column<double>(uniform, "uniform", Kind::kFloat64, a.rows);
    a.ids = column<int64_t>(ids_object, "ids", Kind::kInt64, a.rows);
    nb::gil_scoped_release release;
    run_sample(pool_, isa_, a);
  }

  double measure_read(int64_t bytes, int repeat) {  // GB/s, the best of `repeat` passes
    nb::gil_scoped_release release;
    const int64_t count = bytes / 4;
    Buffer buffer(static_cast<size_t>(bytes));
    std::memset(buffer.data(), 0, buffer.size());
    const float* x = reinterpret_cast<const float*>(buffer.data());
    double best = 0;
    for (int i = 0; i < repeat; ++i) {
      std::atomic<int> sink{0};
      Pieces pieces(count, pool_.threads(), 1 << 16);
      const auto start = std::chrono::steady_clock::now();
      pool_.run([&](int) {
        for (int64_t begin, end; pieces.next(&begin, &end);) sink += int(isa_.measure_read(x, begin, end));
      });
      const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
      best = std::max(best, double(bytes) / took.count() / 1e9);
    }
    return best;
  }

  int64_t measure_matrix(int dtype, int64_t rounds) {
    std::atomic<int64_t> operations{0};
    nb::gil_scoped_release release;
    Pieces pieces(rounds, pool_.threads(), 1000);
    pool_.run([&](int) {
      for (int64_t begin, end; pieces.next(&begin, &end);)
        operations += isa_.measure_matrix(dtype == 1 ? DType::kBFloat16 : DType::kFloat32, end - begin);
    });
    return operations;
  }

  // Ask for huge pages under a large tensor that has not been touched yet.
  void advise_huge(nb::handle object) { advise_huge_pages(view(object, "tensor").data, view(object, "tensor").numel() * view(object, "tensor").item()); }

  // The first `bytes` of a tensor: their pages are there afterwards. False where the system cannot.
  bool populate(nb::handle object, int64_t bytes) {
    const Tensor t = view(object, "tensor");
    require(bytes > 0 && bytes <= t.numel() * t.item(), "bytes", "must lie within the tensor");
    nb::gil_scoped_release release;
    return populate_pages(t.data, bytes);
  }

  // Whether a block from this one on was written to before so many seconds were over.
  bool wait_for_block(int64_t block, double seconds) {
    nb::gil_scoped_release release;
    return water_.wait(block, seconds);
  }

 private:
  void norm(const Tensor& x, const Tensor* residual, nb::handle weight_object, nb::handle out_object, double eps) {
    const Tensor out = view(out_object, "out");
    int64_t rows;
    NormArgs a = norm_args(x, residual, weight_object, eps, &rows);
    require(out.contiguous() && out.kind == x.kind && out.numel() == rows * a.E, "out", "has the wrong shape");
    a.out = out.data;
    desk_.put([this, a, rows] { run_norm(pool_, isa_, a, rows); });
  }

  static const float* per_head(nb::handle object, const char* name, int64_t heads) {
    if (object.is_none()) return nullptr;
    const Tensor t = view(object, name, 1, Kind::kFloat32);
    require(t.shape[0] == heads && t.contiguous(), name, "must be contiguous, one value a query head");
    return t.as<float>();
  }

  template <class T> static T* column(nb::handle object, const char* name, Kind kind, int64_t rows) {
    const Tensor t = view(object, name, 1, kind);
    require(t.shape[0] == rows && t.contiguous(), name, "must be contiguous, one value a row");
    return t.as<T>();
  }

  const Isa& isa_;
  Pool pool_;
  Arena arena_;
  Desk desk_;
  HighWater water_;
};

}  // namespace

NB_MODULE(_native, m) {
  m.doc() = "The compiled kernels of the CPU plugin.";
  nb::set_leak_warnings(false);  // a process may end with its engine still there; that is no leak to tell a user about
  m.def("isa", [] { return choose_isa("")->name; }, "The instruction set that is used unless another is asked for.");
  nb::class_<Linear>(m, "Linear")
      .def("run", &Linear::run, "y = x w^T + bias")
      .def("rows", &Linear::rows)
      .def_prop_ro("in_features", &Linear::in_features)
      .def_prop_ro("out_features", &Linear::out_features)
      .def_prop_ro("nbytes", &Linear::nbytes);
  nb::class_<QuantLinear>(m, "QuantLinear")
      .def("run", &QuantLinear::run, "y = x w^T + bias")
      .def("run_normed", &QuantLinear::run_normed, nb::arg("x"), nb::arg("residual").none(), nb::arg("weight"), nb::arg("eps"), nb::arg("y"),
           "y = rms_norm(x) w^T + bias; with a residual, x is added to that first")
      .def("run_gated", &QuantLinear::run_gated, nb::arg("x"), nb::arg("kind"), nb::arg("y"), "y = act(x1) * x2 w^T + bias")
      .def("rows", &QuantLinear::rows)
      .def_prop_ro("in_features", &QuantLinear::in_features)
      .def_prop_ro("out_features", &QuantLinear::out_features)
      .def_prop_ro("nbytes", &QuantLinear::nbytes);
  nb::class_<Tape>(m, "Tape").def("run", &Tape::run, nb::arg("begin"), nb::arg("end")).def("__len__", &Tape::size);
  nb::class_<Kernels>(m, "Kernels")
      .def(nb::init<int, std::string>(), nb::arg("threads"), nb::arg("isa") = "")
      .def_prop_ro("isa", &Kernels::isa)
      .def_prop_ro("threads", &Kernels::threads)
      .def("linear", &Kernels::linear, nb::arg("weight"), nb::arg("bias").none(), nb::rv_policy::take_ownership, nb::keep_alive<0, 1>())
      .def("quant_linear", &Kernels::quant_linear, nb::arg("scheme"), nb::arg("blocks"), nb::arg("inputs"), nb::arg("bias").none(),
           nb::rv_policy::take_ownership, nb::keep_alive<0, 1>())
      .def("start_tape", &Kernels::start_tape)
      .def("taped", &Kernels::taped)
      .def("end_tape", &Kernels::end_tape, nb::keep_alive<0, 1>())
      .def("rms_norm", &Kernels::rms_norm)
      .def("add_rms_norm", &Kernels::add_rms_norm)
      .def("rotary", &Kernels::rotary, nb::arg("positions"), nb::arg("query"), nb::arg("key").none(), nb::arg("cos_sin"), nb::arg("interleaved"))
      .def("gate", &Kernels::gate)
      .def("lora_shrink", &Kernels::lora_shrink)
      .def("lora_expand", &Kernels::lora_expand)
      .def("cache_write", &Kernels::cache_write)
      .def("attention", &Kernels::attention, nb::arg("query"), nb::arg("kv_cache"), nb::arg("query_start_loc"), nb::arg("seq_lens"),
           nb::arg("block_table"), nb::arg("out"), nb::arg("scale"), nb::arg("soft_cap"), nb::arg("window"), nb::arg("sinks").none(),
           nb::arg("alibi_slopes").none(), nb::arg("causal"))
      .def("copy_blocks", &Kernels::copy_blocks)
      .def("sample", &Kernels::sample)
      .def("advise_huge", &Kernels::advise_huge)
      .def("populate", &Kernels::populate)
      .def("wait_for_block", &Kernels::wait_for_block, nb::arg("block"), nb::arg("seconds"))
      .def("measure_read", &Kernels::measure_read)
      .def("measure_matrix", &Kernels::measure_matrix);
}
