// Calls kernels for a test that runs on another processor.
//
//   driver LIBRARY paths            prints the paths that this processor can take
//   driver LIBRARY serve THREADS    answers requests until its input ends
//
// A request, all numbers of 64 bits: the length of a C symbol and the symbol; the number of buffers and for each its
// size, its address modulo 64 and its bytes; the number of words and the words; the number of pointers among them and
// for each its place in the words and its buffer, the word itself being the offset. The answer: what the kernel
// returned, then the bytes of every buffer.
#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

namespace {

[[noreturn]] void fail(const char* what) {
    std::fprintf(stderr, "driver: %s\n", what);
    std::exit(1);
}

void read_bytes(void* to, size_t size) {
    if (std::fread(to, 1, size, stdin) != size) fail("the request ends too early");
}

void write_bytes(const void* from, size_t size) {
    if (std::fwrite(from, 1, size, stdout) != size) fail("the answer cannot be written");
}

uint64_t read_word() {
    uint64_t word;
    read_bytes(&word, sizeof word);
    return word;
}

// Followed by bytes of a known value, so that a kernel that writes past the end is noticed.
struct Buffer {
    static constexpr size_t kGuard = 256;
    std::vector<unsigned char> memory;
    unsigned char* data;
    size_t size;

    Buffer(size_t bytes, size_t alignment) : memory(bytes + kGuard + 128, 0xa5), size(bytes) {
        const uint64_t address = reinterpret_cast<uint64_t>(memory.data());
        data = memory.data() + (64 - address % 64) % 64 + alignment;
        read_bytes(data, size);
    }

    bool intact() const {
        for (const unsigned char* at = memory.data(); at < data; at++)
            if (*at != 0xa5) return false;
        for (size_t i = 0; i < kGuard; i++)
            if (data[size + i] != 0xa5) return false;
        return true;
    }
};

void answer(void* library, const std::string& symbol) {
    using Call = int32_t (*)(const uint64_t* words);
    const Call call = reinterpret_cast<Call>(dlsym(library, symbol.c_str()));
    if (call == nullptr) fail(dlerror());
    std::vector<Buffer> buffers;
    const uint64_t num_buffers = read_word();
    buffers.reserve(num_buffers);
    for (uint64_t i = 0; i < num_buffers; i++) {
        const uint64_t size = read_word(), alignment = read_word();
        buffers.emplace_back(size, alignment);
    }
    std::vector<uint64_t> words(read_word());
    read_bytes(words.data(), words.size() * sizeof(uint64_t));
    for (uint64_t left = read_word(); left > 0; left--) {
        const uint64_t place = read_word(), buffer = read_word();
        words.at(place) += reinterpret_cast<uint64_t>(buffers.at(buffer).data);
    }
    const int64_t result = call(words.data());
    write_bytes(&result, sizeof result);
    for (const Buffer& buffer : buffers) {
        if (!buffer.intact()) fail((symbol + " writes outside its buffers").c_str());
        write_bytes(buffer.data, buffer.size);
    }
    std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
    if (argc < 3) fail("usage: driver LIBRARY paths | driver LIBRARY serve THREADS");
    void* library = dlopen(argv[1], RTLD_NOW);
    if (library == nullptr) fail(dlerror());
    if (argc == 3) {
        const auto paths = reinterpret_cast<const char* (*)()>(dlsym(library, "penstock_paths"));
        std::puts(paths());
        return 0;
    }
    reinterpret_cast<int (*)(int)>(dlsym(library, "penstock_set_num_threads"))(std::atoi(argv[3]));
    for (uint64_t length; std::fread(&length, sizeof length, 1, stdin) == 1;) {
        std::string symbol(length, ' ');
        read_bytes(&symbol[0], length);
        answer(library, symbol);
    }
    return 0;
}
