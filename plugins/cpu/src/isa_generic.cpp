#define EC_ISA ec_generic
#define EC_NAME "generic"
#include "isa_body.inl"

const Isa* isa_generic() { return &ec_generic::kTable; }
