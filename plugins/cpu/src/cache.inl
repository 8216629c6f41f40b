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

template <class T> void cache_write_tokens(const CacheWriteArgs& a, int64_t t0, int64_t t1) {
  const CacheView& c = a.cache;
  for (int64_t t = t0; t < t1; ++t) {
    const int64_t slot = a.slots[t];
    if (slot < 0) continue;
    char* block = c.data + slot / c.block_size * c.block_bytes();
    const int64_t offset = slot % c.block_size;
    for (int h = 0; h < c.kv_heads; ++h) {
      char* head = block + h * c.head_bytes();
      write_key(reinterpret_cast<const T*>(a.k + t * a.k_token + h * a.k_head), head, c, offset);
      write_value(reinterpret_cast<const T*>(a.v + t * a.v_token + h * a.v_head), head + c.side_bytes(), c, offset);
    }
  }
}

void cache_write(const CacheWriteArgs& a, int64_t t0, int64_t t1) {
  if (a.cache.dtype == DType::kFloat32) cache_write_tokens<float>(a, t0, t1);
  else cache_write_tokens<bf16>(a, t0, t1);
}

}  // namespace
}  // namespace EC_ISA
