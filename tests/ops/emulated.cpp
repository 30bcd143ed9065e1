// The CPU kernels as a program of their own, for CPUs that are emulated: reads tensors from standard input,
// and writes results to standard output. Exits with 2 if a result depends on the batch or the chunk,
// or if a 4-bit weight is not multiplied as the dequantized one; with 4 if integers are not multiplied by the tiles that are
// here, or for few tokens by them.
#include "cpu_attention.cpp"
#include "cpu_kernels.cpp"
#include "cpu_quantized.cpp"

#include <cstdio>
#include <cstdlib>
#include <string>

template <class T>
static std::vector<T> take(int64_t count) {
  std::vector<T> values(count);
  if (std::fread(values.data(), sizeof(T), count, stdin) != size_t(count)) std::exit(3);
  return values;
}

template <class T>
static void same(const T* one, const T* other, int64_t count) {
  if (std::memcmp(one, other, count * sizeof(T)) != 0) std::exit(2);
}

// x[tokens, inner], weight[outputs, inner] -> out[tokens, outputs], packed and as it is.
template <class T>
static void run_linear(int64_t tokens, int64_t inner, int64_t outputs) {
  const auto x = take<T>(tokens * inner), weight = take<T>(outputs * inner);
  std::vector<uint32_t> packed(outputs * inner * sizeof(T) / 4);
  std::vector<T> out(tokens * outputs), alone(outputs);
  pack_weight(weight.data(), packed.data(), inner, outputs, 1);
  for (bool is_packed : {true, false}) {
    auto multiply = [&](int64_t token, int64_t count, T* target) {
      const T* rows = x.data() + token * inner;
      if (is_packed)
        linear_packed<T>(rows, packed.data(), nullptr, target, count, inner, outputs, 1);
      else
        linear<T>(rows, weight.data(), nullptr, target, count, inner, outputs, 1);
    };
    multiply(0, tokens, out.data());
    for (int64_t token = 0; token < tokens; ++token) {
      multiply(token, 1, alone.data());
      same(alone.data(), &out[token * outputs], outputs);
    }
    std::fwrite(out.data(), sizeof(T), out.size(), stdout);
  }
}

// One sequence: q[tokens, 2 heads, 64] and a cache of one KV head in blocks of 16, in order -> out of q's shape.
template <class T>
static void run_attention(int64_t tokens) {
  const int64_t heads = 2, head_dim = 64, block = 16, blocks = (tokens + block - 1) / block;
  const auto q = take<T>(tokens * heads * head_dim), cache = take<T>(blocks * 2 * block * head_dim);
  std::vector<int32_t> table(blocks);
  for (int32_t i = 0; i < blocks; ++i) table[i] = i;
  std::vector<T> out(q.size()), part(q.size());
  auto attend = [&](int32_t begin, int32_t end, T* target) {
    const int32_t starts[] = {0, end - begin};
    paged_attention<T>(q.data() + begin * heads * head_dim, cache.data(), target, table.data(), &end, starts, 1, heads, 1,
                       head_dim, block, heads * head_dim, blocks, 2 * block * head_dim, blocks, blocks, 0.125f, 0, 0.0f,
                       1);
  };
  attend(0, tokens, out.data());
  for (int32_t begin = 0, end; begin < tokens; begin = end) {  // chunks of 1, 2, 4, ... tokens
    end = std::min<int32_t>(tokens, 2 * begin + 1);
    attend(begin, end, part.data());
    same(part.data(), &out[begin * heads * head_dim], (end - begin) * heads * head_dim);
  }
  std::fwrite(out.data(), sizeof(T), out.size(), stdout);
}

// x[tokens, inner], the dequantized weight[outputs, inner], what pack_nibbles made of it, with scales for W4A16 and for W4A8,
// and what pack_values made of another weight: W4A16, beside which the dequantized weight is multiplied, too, W4A8 and W8A8,
// by the functions that the layers call, and each token by itself -> three times out[tokens, outputs].
template <class T>
static void run_quantized(int64_t tokens, int64_t inner, int64_t outputs, int64_t groups) {
  const auto x = take<T>(tokens * inner), weight = take<T>(outputs * inner);
  const auto nibbles = take<uint32_t>(outputs * inner / 8);
  const auto scales = take<T>(outputs * groups);
  const auto zeros = take<uint8_t>(outputs * groups);
  const auto wide = take<float>(outputs * groups);
  const auto values = take<uint32_t>(outputs * inner / 4);
  const auto row_scales = take<float>(outputs);
  std::vector<uint32_t> packed(outputs * inner * sizeof(T) / 4);
  std::vector<T> out(tokens * outputs), other(tokens * outputs);
  pack_weight(weight.data(), packed.data(), inner, outputs, 1);
  linear_packed<T>(x.data(), packed.data(), nullptr, other.data(), tokens, inner, outputs, 1);
  linear_w4a16<T>(x.data(), nibbles.data(), scales.data(), zeros.data(), nullptr, out.data(), tokens, inner, outputs,
                  groups, 1);
  same(out.data(), other.data(), tokens * outputs);
  std::fwrite(out.data(), sizeof(T), out.size(), stdout);
  const Addresses w4a8{nibbles.data(), wide.data(), zeros.data(), groups};
  layer_w4a8<T>(x.data(), &w4a8, nullptr, out.data(), tokens, inner, outputs, 1);
  for (int64_t token = 0; token < tokens; ++token) {
    linear_w4a8<T>(x.data() + token * inner, nibbles.data(), wide.data(), zeros.data(), nullptr, other.data(), 1, inner,
                   outputs, groups, 1);
    same(other.data(), &out[token * outputs], outputs);
  }
  std::fwrite(out.data(), sizeof(T), out.size(), stdout);
  const Addresses w8a8{values.data(), row_scales.data(), nullptr, 1};
  layer_w8a8<T>(x.data(), &w8a8, nullptr, out.data(), tokens, inner, outputs, 1);
  for (int64_t token = 0; token < tokens; ++token) {
    linear_w8a8<T>(x.data() + token * inner, values.data(), row_scales.data(), nullptr, nullptr, other.data(), 1, inner,
                   outputs, 1, 1);
    same(other.data(), &out[token * outputs], outputs);
  }
  std::fwrite(out.data(), sizeof(T), out.size(), stdout);
#if HAS_BYTE_TILES
  if ((emulated_byte_products > 0) != (tokens > FEW_TOKENS)) std::exit(4);  // both ways are to be tested
#endif
}

int main(int count, char** arguments) {
  const std::string kernel = arguments[1], dtype = arguments[2];
  auto number = [&](int i) { return i < count ? std::atoll(arguments[i]) : 0; };
  if (kernel == "linear")
    (dtype == "float32" ? run_linear<float> : run_linear<bfloat16>)(number(3), number(4), number(5));
  else if (kernel == "quantized")
    (dtype == "float32" ? run_quantized<float> : run_quantized<bfloat16>)(number(3), number(4), number(5), number(6));
  else
    (dtype == "float32" ? run_attention<float> : run_attention<bfloat16>)(number(3));
}
