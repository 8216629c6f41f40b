#define EC_ISA ec_avx512_bf16
#define EC_NAME "avx512_bf16"
#include "isa_body.inl"

const Isa* isa_avx512_bf16() { return &ec_avx512_bf16::kTable; }
