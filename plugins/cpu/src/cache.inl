// Writing keys and values into their slots, in the layout that kernels.hpp describes.
namespace EC_ISA {
namespace {

template <class T>
void write_key(const T* source, char* head, const CacheView& c, int64_t offset) {
  const int width = c.block_size < kPanel ? c.block_size : kPanel;
  const int64_t steps = (c.head_size + Step<T>::kWidth - 1) / Step<T>::kWidth;
  char* to = head + (offset / width * steps * width + offset % width) * 4;
  const int64_t whole = c.head_size / Step<T>::kWidth;
  for (int64_t s = 0; s < whole; ++s) memcpy(to + s * width * 4, source + s * Step<T>::kWidth, 4);
  if (whole < steps) {
    const T pair[2] = {source[c.head_size - 1], T{}};
    memcpy(to + whole * width * 4, pair, 4);
  }
}

void write_value(const float* source, char* head, const CacheView& c, int64_t offset) {
  memcpy(head + offset * c.padded * 4, source, c.head_size * 4);
}

void write_value(const bf16* source, char* head, const CacheView& c, int64_t offset) {
  bf16* to = reinterpret_cast<bf16*>(head) + offset / 2 * 2 * c.padded + offset % 2;
  for (int d = 0; d < c.head_size; ++d) to[2 * d] = source[d];
}

void write_key(const uint8_t* codes, char* head, const CacheView& c, int64_t offset) {
  const int width = c.block_size < kPanel ? c.block_size : kPanel;
  const int64_t steps = c.key_steps();
  char* to = head + (offset / width * steps * width + offset % width) * 4;
  for (int64_t s = 0; s < steps; ++s) memcpy(to + s * width * 4, codes + s * 4, 4);
}

void write_value(const uint8_t* codes, char* head, const CacheView& c, int64_t offset) {
  char* to = head + offset / 4 * 4 * c.padded + offset % 4;
  for (int d = 0; d < c.head_size; ++d) to[4 * d] = char(codes[d]);
}

constexpr int kMostHead = 1024;  // numbers of one head that a cache of bytes may have

template <class T> void encode(const T* x, const CacheView& c, uint8_t* codes, char* head, int64_t offset) {
  if (c.stored == Stored::kE4M3) return encode_float8<Stored::kE4M3>(x, c.head_size, codes);
  if (c.stored == Stored::kE5M2) return encode_float8<Stored::kE5M2>(x, c.head_size, codes);
  const float scale = encode_int8(x, c.head_size, codes);
  memcpy(head + c.code_bytes() + offset * 4, &scale, 4);
}

template <class T> void cache_write_tokens(const CacheWriteArgs& a, int64_t t0, int64_t t1) {
  const CacheView& c = a.cache;
  alignas(64) uint8_t codes[kMostHead];
  for (int64_t t = t0; t < t1; ++t) {
    const int64_t slot = a.slots[t];
    if (slot < 0) continue;
    char* block = c.data + slot / c.block_size * c.block_bytes();
    const int64_t offset = slot % c.block_size;
    for (int h = 0; h < c.kv_heads; ++h) {
      char* const keys = block + h * c.head_bytes();
      char* const values = keys + c.side_bytes();
      const T* k = reinterpret_cast<const T*>(a.k + t * a.k_token + h * a.k_head);
      const T* v = reinterpret_cast<const T*>(a.v + t * a.v_token + h * a.v_head);
      if (c.stored == Stored::kPlain) {
        write_key(k, keys, c, offset);
        write_value(v, values, c, offset);
        continue;
      }
      encode(k, c, codes, keys, offset);
      write_key(codes, keys, c, offset);
      encode(v, c, codes, values, offset);
      write_value(codes, values, c, offset);
    }
  }
}

void cache_write(const CacheWriteArgs& a, int64_t t0, int64_t t1) {
  if (a.cache.dtype == DType::kFloat32) cache_write_tokens<float>(a, t0, t1);
  else cache_write_tokens<bf16>(a, t0, t1);
}

}  // namespace
}  // namespace EC_ISA
