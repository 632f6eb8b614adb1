// PyTorch's at::parallel_for on threads that a thread sanitizer understands; it stands before the real header on the include path.

#pragma once

#include <algorithm>
#include <cstdint>
#include <thread>
#include <vector>

namespace at {

inline int number_of_threads = 1;

inline int get_num_threads() {
  return number_of_threads;
}

template <typename Body>
void parallel_for(int64_t begin, int64_t end, int64_t grain, const Body& body) {
  const int64_t count = std::min<int64_t>(number_of_threads, (end - begin + grain - 1) / grain);
  std::vector<std::thread> threads;
  for (int64_t i = 0; i < count; ++i) {
    threads.emplace_back([&, i] { body(begin + (end - begin) * i / count, begin + (end - begin) * (i + 1) / count); });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
}

}  // namespace at
