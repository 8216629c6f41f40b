#define EC_ISA ec_avx2
#define EC_NAME "avx2"
#include "isa_body.inl"

const Isa* isa_avx2() { return &ec_avx2::kTable; }
