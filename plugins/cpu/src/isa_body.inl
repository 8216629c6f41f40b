// Everything that is compiled once for each instruction set.
#include "simd.hpp"

#include "product.inl"

#include "linear.inl"
#include "quant.inl"
#include "bytes.inl"
#include "pointwise.inl"

#include "kvbytes.inl"
#include "attention.inl"
#include "cache.inl"
#include "lora.inl"

namespace EC_ISA {
static const Isa kTable = {EC_NAME, linear, quantize, norm_quantize, gate_quantize, quant_linear, byte_linear, attention,
                           attention_merge, cache_write, norm, rotary, gate, arg_max, exp_row, collect, measure_read,
                           measure_matrix, lora_shrink, lora_expand};
}
