// Scores of index queries against keys: tiles of both, whose dots never leave the cache of a core.
//
// The dots of a tile are one product for all heads, PyTorch's own GEMM, which runs on one thread
// inside of a parallel region. relu and the weighted sum over heads follow while they are in cache.

#include <ATen/Parallel.h>
#include <ATen/ops/addmm_cpu_dispatch.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <limits>
#include <string>
#include <vector>

namespace {

// Laid out as in _index_tiles.py; strides count elements.
struct Problem {
  const float* q;        // [rows, heads, dim], contiguous
  const float* weights;  // [rows, heads], contiguous
  const float* k;        // [keys, dim]
  const int64_t* ends;   // [rows], how many of the keys a row sees
  float* out;            // [rows, keys]
  int64_t k_row, out_row;
  int64_t rows, heads, dim, keys;
  int64_t tile_rows, tile_keys;
};

at::Tensor matrix(const float* data, int64_t rows, int64_t columns, int64_t row, int64_t column) {
  return at::from_blob(const_cast<float*>(data), {rows, columns}, {row, column}, at::kFloat);
}

class Worker {
 public:
  explicit Worker(const Problem& problem)
      : p_(problem),
        dots_(std::min(p_.tile_rows, p_.rows) * p_.heads * std::min(p_.tile_keys, p_.keys)) {}

  void run(int64_t start, int64_t first) {
    const int64_t rows = std::min(p_.tile_rows, p_.rows - start);
    const int64_t keys = std::min(p_.tile_keys, p_.keys - first);
    float* out = p_.out + start * p_.out_row + first;
    if (*std::max_element(p_.ends + start, p_.ends + start + rows) <= first) {
      // No row sees any of these keys; the caller compares what lies here before it hides it.
      for (int64_t i = 0; i < rows; i++) {
        std::fill_n(out + i * p_.out_row, keys, -std::numeric_limits<float>::infinity());
      }
      return;
    }
    at::Tensor dots = matrix(dots_.data(), rows * p_.heads, keys, keys, 1);
    at::cpu::addmm_out(
        dots,
        dots,
        matrix(p_.q + start * p_.heads * p_.dim, rows * p_.heads, p_.dim, p_.dim, 1),
        matrix(p_.k + first * p_.k_row, p_.dim, keys, 1, p_.k_row),
        0,
        1);
    for (int64_t i = 0; i < rows; i++) sum_heads(start + i, i, keys, out + i * p_.out_row);
  }

 private:
  void sum_heads(int64_t row, int64_t at, int64_t keys, float* out) const {
    const float* weights = p_.weights + row * p_.heads;
    const float* dots = dots_.data() + at * p_.heads * keys;
    std::fill_n(out, keys, 0.0f);
    for (int64_t h = 0; h < p_.heads; h++) {
      const float weight = weights[h];
      const float* x = dots + h * keys;
      // A dot that is NaN is one here, as torch.relu leaves it.
#pragma omp simd
      for (int64_t j = 0; j < keys; j++) out[j] += weight * (x[j] < 0.0f ? 0.0f : x[j]);
    }
  }

  const Problem& p_;
  std::vector<float> dots_;
};

void score(const Problem& p) {
  const int64_t row_tiles = (p.rows + p.tile_rows - 1) / p.tile_rows;
  const int64_t key_tiles = (p.keys + p.tile_keys - 1) / p.tile_keys;
  const int64_t tasks = row_tiles * key_tiles;
  const int64_t threads = std::min<int64_t>(at::get_num_threads(), tasks);
  std::atomic<int64_t> next{0};
  at::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    Worker worker(p);
    for (int64_t task; (task = next++) < tasks;) {
      worker.run(task % row_tiles * p.tile_rows, task / row_tiles * p.tile_keys);
    }
  });
}

}  // namespace

// Null, or what went wrong.
extern "C" const char* dsafx_score(const Problem* problem) {
  static thread_local std::string error;
  try {
    score(*problem);
    return nullptr;
  } catch (const std::exception& caught) {
    error = caught.what();
    return error.c_str();
  }
}
