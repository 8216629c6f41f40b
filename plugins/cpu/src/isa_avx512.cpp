#define EC_ISA ec_avx512
#define EC_NAME "avx512"
#include "isa_body.inl"

const Isa* isa_avx512() { return &ec_avx512::kTable; }
