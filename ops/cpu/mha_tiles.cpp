// Attention over expanded keys and values: tiles of queries and keys, softmax as the keys go by.
//
// One thread takes one head of one block of queries at a time and goes over the keys that the block
// sees. Its two products per tile are PyTorch's own GEMM, which runs on one thread inside of a
// parallel region, so threads meet once per call. What a task computes does not depend on the
// thread that takes it.

#include <ATen/Parallel.h>
#include <ATen/ops/addmm_cpu_dispatch.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <exception>
#include <limits>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace {

constexpr float kHidden = -std::numeric_limits<float>::infinity();

// A [rows, heads, width] tensor; strides count elements.
struct Array {
  void* data;
  int64_t row, head, column;
};

// Query rows start .. stop and the packed keys first .. last that any of them may see.
struct Block {
  int64_t start, stop, first, last;
};

// Laid out as in _tiles.py.
struct Problem {
  Array q, k, v, out;
  Array q_pe, k_pe;  // the rest of each query and key; pe_width is 0 where there is none
  float* lse;  // [rows, heads], contiguous
  const int32_t* ks;
  const int32_t* ke;
  const uint8_t* mask;  // null, or whether row mask_start + i reads key mask_first + j
  const Block* blocks;
  int64_t num_blocks, heads, width, v_width, pe_width;
  int64_t mask_start, mask_first, mask_row;
  int64_t most_rows, most_keys, edge_keys;
  int64_t is_half;
  double scale;
};

// e^x for x <= 0 to about one unit in the last place, and 0 below the normal numbers; NaN stays.
inline float exp_of_negative(float x) {
  // Adding this leaves an integer in the low bits of the mantissa.
  constexpr float kRound = 12582912.0f;
  const float rounded = x * 1.44269504088896341f + kRound;
  uint32_t bits;
  std::memcpy(&bits, &rounded, sizeof(bits));
  bits = (bits + 127u) << 23;
  float power;
  std::memcpy(&power, &bits, sizeof(power));
  const float n = rounded - kRound;
  const float r = (x - n * 0.693145751953125f) - n * 1.42860682030941723212e-6f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  return x < -87.0f ? 0.0f : p * power;
}

float largest(const float* x, int64_t n) {
  float best = kHidden;
#pragma omp simd reduction(max : best)
  for (int64_t i = 0; i < n; i++) best = x[i] > best ? x[i] : best;
  return best;
}

// The largest of the chosen; the others become kHidden.
float hide_and_find_largest(float* x, const uint8_t* chosen, int64_t n) {
  float best = kHidden;
#pragma omp simd reduction(max : best)
  for (int64_t i = 0; i < n; i++) {
    x[i] = chosen[i] ? x[i] : kHidden;
    best = x[i] > best ? x[i] : best;
  }
  return best;
}

float exp_and_sum(float* x, int64_t n, float shift) {
  float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; i++) {
    x[i] = exp_of_negative(x[i] - shift);
    sum += x[i];
  }
  return sum;
}

at::Tensor matrix(const float* data, int64_t rows, int64_t columns, int64_t row, int64_t column) {
  return at::from_blob(const_cast<float*>(data), {rows, columns}, {row, column}, at::kFloat);
}

// Rows of float32 numbers and how far they lie apart.
struct Rows {
  const float* data;
  int64_t stride;
};

template <typename T>
class Worker {
 public:
  explicit Worker(const Problem& problem)
      : p_(problem),
        scores_(p_.most_rows * p_.most_keys),
        sums_(p_.most_rows * p_.v_width),
        best_(p_.most_rows),
        total_(p_.most_rows),
        read_(p_.most_keys) {}

  void run(const Block& block, int64_t head) {
    start_ = block.start;
    const int64_t rows = block.stop - block.start;
    std::fill_n(best_.begin(), rows, kHidden);
    std::fill_n(total_.begin(), rows, 0.0f);
    std::fill_n(sums_.begin(), rows * p_.v_width, 0.0f);
    const Part nope{p_.q, p_.width}, pe{p_.q_pe, p_.pe_width};
    const Rows q = rows_of(nope, pe, block.start, rows, head, queries_);

    // Keys that all rows see, and the edges where intervals begin and end.
    const int64_t first = *std::max_element(p_.ks + block.start, p_.ks + block.stop);
    const int64_t last = *std::min_element(p_.ke + block.start, p_.ke + block.stop);
    const int64_t from = first < last ? first : block.first;
    const int64_t to = first < last ? last : block.first;
    edge(block, q, head, block.first, from);
    for (int64_t key = from; key < to; key += p_.most_keys) {
      tile(block.start, rows, q, head, key, std::min(key + p_.most_keys, to), true);
    }
    edge(block, q, head, to, block.last);
    finish(block.start, rows, head);
  }

 private:
  // Narrow tiles, each with the rows that see some of it.
  void edge(const Block& block, Rows q, int64_t head, int64_t first, int64_t last) {
    for (int64_t key = first; key < last; key += p_.edge_keys) {
      const int64_t end = std::min(key + p_.edge_keys, last);
      auto blind = [&](int64_t row) { return p_.ks[row] >= end || p_.ke[row] <= key; };
      int64_t start = block.start, stop = block.stop;
      while (start < stop && blind(start)) start++;
      while (start < stop && blind(stop - 1)) stop--;
      if (start == stop) continue;
      const Rows part{q.data + (start - block.start) * q.stride, q.stride};
      tile(start, stop - start, part, head, key, end, false);
    }
  }

  // Scores, probabilities and values of rows x keys, added to what the rows have so far.
  void tile(
      int64_t start, int64_t rows, Rows q, int64_t head, int64_t first, int64_t last, bool all) {
    const int64_t keys = last - first;
    const bool whole = p_.mask == nullptr && all;
    const int64_t reads = whole ? keys : find_read(start, rows, first, keys);
    if (reads == 0) return;
    // What nobody reads may be NaN: softmax() overwrites such a score, but 0 * NaN is NaN.
    const uint8_t* read = reads < keys ? read_.data() : nullptr;
    at::Tensor scores = matrix(scores_.data(), rows, keys, keys, 1);
    const int64_t width = p_.width + p_.pe_width;
    const Rows k = rows_of({p_.k, p_.width}, {p_.k_pe, p_.pe_width}, first, keys, head, keys_);
    at::cpu::addmm_out(
        scores,
        scores,
        matrix(q.data, rows, width, q.stride, 1),
        matrix(k.data, width, keys, 1, k.stride),
        0,
        p_.scale);
    for (int64_t i = 0; i < rows; i++) {
      softmax(start + i, scores_.data() + i * keys, first, keys, whole);
    }
    const Rows v = rows_of({p_.v, p_.v_width}, {}, first, keys, head, values_, read);
    float* from = sums_.data() + (start - start_) * p_.v_width;
    at::Tensor sums = matrix(from, rows, p_.v_width, p_.v_width, 1);
    at::cpu::addmm_out(sums, sums, scores, matrix(v.data, keys, p_.v_width, v.stride, 1), 1, 1);
  }

  // The part of the keys first .. first + keys that a row sees, relative to first.
  std::pair<int64_t, int64_t> seen(int64_t row, int64_t first, int64_t keys) const {
    const int64_t from = std::clamp<int64_t>(p_.ks[row] - first, 0, keys);
    return {from, std::clamp<int64_t>(p_.ke[row] - first, from, keys)};
  }

  const uint8_t* mask_of(int64_t row, int64_t first) const {
    return p_.mask + (row - p_.mask_start) * p_.mask_row + (first - p_.mask_first);
  }

  // Marks the keys that some row reads, and counts them.
  int64_t find_read(int64_t start, int64_t rows, int64_t first, int64_t keys) {
    std::fill_n(read_.begin(), keys, uint8_t{0});
    uint8_t* read = read_.data();
    for (int64_t row = start; row < start + rows; row++) {
      const auto [from, to] = seen(row, first, keys);
      if (p_.mask == nullptr) {
        std::fill(read + from, read + to, uint8_t{1});
      } else {
        const uint8_t* chosen = mask_of(row, first);
        for (int64_t i = from; i < to; i++) read[i] |= chosen[i];
      }
    }
    return std::count(read, read + keys, uint8_t{1});
  }

  // Turns scores of a row into probabilities times a factor that finish() takes out again.
  void softmax(int64_t row, float* x, int64_t first, int64_t keys, bool whole) {
    const int64_t at = row - start_;
    int64_t from = 0, to = keys;
    if (!whole) {
      std::tie(from, to) = seen(row, first, keys);
      std::fill(x, x + from, 0.0f);
      std::fill(x + to, x + keys, 0.0f);
    }
    const float here = p_.mask == nullptr
        ? largest(x + from, to - from)
        : hide_and_find_largest(x + from, mask_of(row, first) + from, to - from);
    const float best = std::max(best_[at], here);
    // Where all is hidden so far, e^(-inf) is wanted and not e^(-inf + inf).
    const float shift = best == kHidden ? 0.0f : best;
    const float sum = exp_and_sum(x + from, to - from, shift);
    if (best != best_[at]) {
      const float factor = std::exp(best_[at] - best);
      total_[at] *= factor;
      float* sums = sums_.data() + at * p_.v_width;
      for (int64_t i = 0; i < p_.v_width; i++) sums[i] *= factor;
      best_[at] = best;
    }
    total_[at] += sum;
  }

  void finish(int64_t start, int64_t rows, int64_t head) {
    for (int64_t i = 0; i < rows; i++) {
      // A row that reads no key has a sum of 0.
      const float factor = total_[i] == 0.0f ? 0.0f : 1.0f / total_[i];
      const float* sums = sums_.data() + i * p_.v_width;
      const Array& out = p_.out;
      T* to = static_cast<T*>(out.data) + (start + i) * out.row + head * out.head;
      for (int64_t j = 0; j < p_.v_width; j++) {
        to[j * out.column] = static_cast<T>(sums[j] * factor);
      }
      p_.lse[(start + i) * p_.heads + head] = best_[i] + std::log(total_[i]);
    }
  }

  // A tensor's columns, or none of them.
  struct Part {
    Array array;
    int64_t width;
  };

  // Rows of one head in float32, two parts side by side: where they lie if they are that already,
  // else a copy in memory, with 0 where nothing is read.
  Rows rows_of(
      const Part& part,
      const Part& rest,
      int64_t start,
      int64_t rows,
      int64_t head,
      std::vector<float>& memory,
      const uint8_t* read = nullptr) {
    if constexpr (std::is_same_v<T, float>) {
      if (read == nullptr && rest.width == 0 && part.array.column == 1) {
        return {address(part.array, start, head), part.array.row};
      }
    }
    const int64_t width = part.width + rest.width;
    if (static_cast<int64_t>(memory.size()) < rows * width) memory.resize(rows * width);
    for (int64_t i = 0; i < rows; i++) {
      float* to = memory.data() + i * width;
      if (read != nullptr && !read[i]) {
        std::fill_n(to, width, 0.0f);
      } else {
        copy_row(part, start + i, head, to);
        copy_row(rest, start + i, head, to + part.width);
      }
    }
    return {memory.data(), width};
  }

  static const T* address(const Array& x, int64_t row, int64_t head) {
    return static_cast<const T*>(x.data) + row * x.row + head * x.head;
  }

  static void copy_row(const Part& part, int64_t row, int64_t head, float* to) {
    const T* from = address(part.array, row, head);
    if (part.array.column == 1) {
      for (int64_t j = 0; j < part.width; j++) to[j] = static_cast<float>(from[j]);
    } else {
      for (int64_t j = 0; j < part.width; j++) {
        to[j] = static_cast<float>(from[j * part.array.column]);
      }
    }
  }

  const Problem& p_;
  int64_t start_ = 0;  // of the block
  std::vector<float> scores_, sums_, best_, total_;
  std::vector<float> queries_, keys_, values_;
  std::vector<uint8_t> read_;
};

template <typename T>
void attend(const Problem& p) {
  std::atomic<int64_t> next{0};
  const int64_t tasks = p.num_blocks * p.heads;
  const int64_t threads = std::min<int64_t>(at::get_num_threads(), tasks);
  at::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    Worker<T> worker(p);
    // The last blocks of a prompt see most; taken first, they leave no thread waiting at the end.
    for (int64_t task; (task = next++) < tasks;) {
      worker.run(p.blocks[p.num_blocks - 1 - task / p.heads], task % p.heads);
    }
  });
}

}  // namespace

// Null, or what went wrong.
extern "C" const char* dsafx_attend(const Problem* problem) {
  static thread_local std::string error;
  try {
    if (problem->is_half) {
      attend<c10::Half>(*problem);
    } else {
      attend<float>(*problem);
    }
    return nullptr;
  } catch (const std::exception& caught) {
    error = caught.what();
    return error.c_str();
  }
}
