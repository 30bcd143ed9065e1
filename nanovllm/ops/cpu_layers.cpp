// CPU kernels, part 3: the layers of a decoder in one call, made of the operators of parts 1 and 2, in the order of
// `DecoderLayer.forward` (models/llama.py), and therefore with the same bits. It saves Python's ten calls per layer.
#include <memory>

#include "cpu_operators.h"

// A matrix, and the function that multiplies by it. If that is null, the weight is one that linear_packed() reads;
// otherwise the function alone, which another library may define, knows what the weight is.
template <class T>
struct Matrix {
  void (*product)(const T* x, const void* weight, const T* bias, T* out, int64_t tokens, int64_t inner, int64_t outputs,
                  int threads);
  const void* weight;
  const T* bias;

  void multiply(const T* x, T* out, int64_t tokens, int64_t inner, int64_t outputs, int threads) const {
    if (product)
      product(x, weight, bias, out, tokens, inner, outputs, threads);
    else
      linear_packed(x, static_cast<const uint32_t*>(weight), bias, out, tokens, inner, outputs, threads);
  }
};

// A layer's KV cache, and the functions that write to it and attend over it: those of parts 1 and 2 if these are null, or
// others, which alone know what is in it.
template <class T>
struct Cache {
  bool (*writing)(const T* k, const T* v, void* kv_cache, const int64_t* slots, int64_t tokens, int64_t num_kv_heads,
                  int64_t head_dim, int64_t num_blocks, int64_t block_size, int64_t k_stride, int64_t v_stride,
                  int64_t block_stride, int threads);
  bool (*attending)(const T* q, const void* kv_cache, T* out, const int32_t* block_tables, const int32_t* seq_lens,
                    const int32_t* query_start_loc, int64_t sequences, int64_t num_heads, int64_t num_kv_heads,
                    int64_t head_dim, int64_t block_size, int64_t q_stride, int64_t num_blocks, int64_t block_stride,
                    int64_t table_width, int64_t table_stride, float scale, int64_t window, float soft_cap,
                    int threads);
  void* blocks;

  template <class... Rest>
  bool write(const T* k, const T* v, Rest... rest) const {
    return writing ? writing(k, v, blocks, rest...) : write_kv_cache(k, v, static_cast<T*>(blocks), rest...);
  }
  template <class... Rest>
  bool attend(const T* q, Rest... rest) const {
    return attending ? attending(q, blocks, rest...) : paged_attention(q, static_cast<const T*>(blocks), rest...);
  }
};

// The addresses of a layer's tensors, as models/fused.py lays them out. What a layer lacks is null; without input_norm, x is
// normalised already, and the layer is the only one.
template <class T>
struct Layer {
  const T *input_norm, *q_norm, *k_norm, *mlp_norm;
  Matrix<T> qkv, o, gate_up, down;
  Cache<T> kv_cache;
  int64_t window;
};

// x[tokens, inner] and residual[tokens, hidden] are overwritten, x with [tokens, hidden]; `inner` is `hidden` but for a layer
// without input_norm. False where a position, a slot or a block does not exist; the
// layers before, and perhaps other tokens of the cache, are computed by then.
template <class T>
static bool decoder_layers(T* x, T* residual, const Layer<T>* layers, const int64_t* positions, const float* cos_sin,
                           const int64_t* slots, const int32_t* block_tables, const int32_t* seq_lens,
                           const int32_t* query_start_loc, int64_t num_layers, int64_t tokens, int64_t inner, int64_t hidden,
                           int64_t num_heads, int64_t num_kv_heads, int64_t head_dim, int64_t intermediate,
                           int64_t num_positions, int64_t sequences, int64_t block_size, int64_t num_blocks,
                           int64_t block_stride, int64_t table_width, int64_t table_stride, float eps, float scale,
                           float soft_cap, int threads) {
  const int64_t q_width = num_heads * head_dim, kv_width = num_kv_heads * head_dim, qkv_width = q_width + 2 * kv_width;
  const auto make = [&](int64_t width) { return std::unique_ptr<T[]>(new T[tokens * width]); };
  const auto normed = make(hidden), qkv = make(qkv_width), q_normed = make(q_width), k_normed = make(kv_width),
             attended = make(q_width), gate_up = make(2 * intermediate), activated = make(intermediate);
  for (const Layer<T>* layer = layers; layer < layers + num_layers; ++layer) {
    if (layer->input_norm) add_rms_norm(x, residual, layer->input_norm, normed.get(), tokens, hidden, eps, threads);
    layer->qkv.multiply(layer->input_norm ? normed.get() : x, qkv.get(), tokens, inner, qkv_width, threads);
    T *q = qkv.get(), *k = q + q_width, *v = k + kv_width;
    int64_t q_stride = qkv_width, k_stride = qkv_width;
    if (layer->q_norm) {
      rms_norm(q, layer->q_norm, q_normed.get(), tokens, num_heads, head_dim, qkv_width, eps, threads);
      rms_norm(k, layer->k_norm, k_normed.get(), tokens, num_kv_heads, head_dim, qkv_width, eps, threads);
      q = q_normed.get(), k = k_normed.get(), q_stride = q_width, k_stride = kv_width;
    }
    if (!apply_rope(q, k, positions, cos_sin, tokens, num_heads, num_kv_heads, head_dim, q_stride, k_stride,
                    num_positions, threads) ||
        !layer->kv_cache.write(k, v, slots, tokens, num_kv_heads, head_dim, num_blocks, block_size, k_stride, qkv_width,
                               block_stride, threads) ||
        !layer->kv_cache.attend(q, attended.get(), block_tables, seq_lens, query_start_loc, sequences, num_heads,
                                num_kv_heads, head_dim, block_size, q_stride, num_blocks, block_stride, table_width,
                                table_stride, scale, layer->window, soft_cap, threads))
      return false;
    layer->o.multiply(attended.get(), x, tokens, q_width, hidden, threads);
    add_rms_norm(x, residual, layer->mlp_norm, normed.get(), tokens, hidden, eps, threads);
    layer->gate_up.multiply(normed.get(), gate_up.get(), tokens, hidden, 2 * intermediate, threads);
    silu_and_mul(gate_up.get(), activated.get(), tokens, intermediate, threads);
    layer->down.multiply(activated.get(), x, tokens, intermediate, hidden, threads);
  }
  return true;
}

EXPORT(decoder_layers)
