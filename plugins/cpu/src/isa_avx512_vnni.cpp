#define EC_ISA ec_avx512_vnni
#define EC_NAME "avx512_vnni"
#include "isa_body.inl"

const Isa* isa_avx512_vnni() { return &ec_avx512_vnni::kTable; }
