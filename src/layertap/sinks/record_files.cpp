// Whole records into files, locks for files to come, and copies by several threads: what would otherwise be several
// calls each, with a return to Python's interpreter, and a wait for its lock, behind every one of them.

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/statvfs.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <system_error>
#include <thread>
#include <unistd.h>
#include <vector>

namespace {

using Hash = uint64_t (*)(const void*, size_t);

struct Record {  // as in native_files.py
    const char* temporary;
    const char* final;
    char* front;           // everything before the data
    const void* data;
    int64_t front_bytes;
    int64_t data_bytes;
    int64_t checksum_at;   // where in front the data's checksum goes, 16 hexadecimal digits
    int64_t needs_space;   // ask the file system first whether there is room
    int64_t sync;
    int64_t error;         // out: errno, or 0
};

int write_all(int file, const Record& record) {
    iovec parts[2] = {{record.front, size_t(record.front_bytes)},
                      {const_cast<void*>(record.data), size_t(record.data_bytes)}};
    off_t position = 0;
    iovec* part = parts;
    iovec* const end = parts + 2;
    while (part < end) {
        ssize_t written = pwritev(file, part, int(end - part), position);
        if (written < 0) {
            if (errno == EINTR) continue;
            return errno;
        }
        if (written == 0) return EIO;
        position += written;
        while (part < end && size_t(written) >= part->iov_len) written -= ssize_t((part++)->iov_len);
        if (part < end) {
            part->iov_base = static_cast<char*>(part->iov_base) + written;
            part->iov_len -= size_t(written);
        }
    }
    return 0;
}

int fill(int file, const Record& record) {
    const int64_t total = record.front_bytes + record.data_bytes;
    if (record.needs_space) {
        struct statvfs space;
        if (fstatvfs(file, &space) != 0) return errno;
        if (space.f_blocks != 0 && uint64_t(space.f_bavail) * space.f_frsize < uint64_t(total)) return ENOSPC;
    }
    if (int error = write_all(file, record)) return error;
    if (record.sync && fsync(file) != 0) return errno;
    return 0;
}

int publish(Record& record, Hash hash) {
    static const char digits[] = "0123456789abcdef";
    const uint64_t sum = hash(record.data, size_t(record.data_bytes));
    for (int i = 0; i < 16; i++) record.front[record.checksum_at + i] = digits[(sum >> (60 - 4 * i)) & 15];
    const int file = open(record.temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (file < 0) return errno;
    int error = fill(file, record);
    if (close(file) != 0 && error == 0) error = errno;
    if (error == 0 && rename(record.temporary, record.final) != 0) error = errno;
    if (error != 0) unlink(record.temporary);
    return error;
}

int lock(const char* path) {
    const int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (file < 0) return -errno;
    while (flock(file, LOCK_EX) != 0) {
        if (errno == EINTR) continue;
        const int error = errno;
        close(file);
        return -error;
    }
    return file;
}

const int64_t piece = 2 << 20;  // of a copy: a large page

// Do `count` things in up to `threads` threads, the caller's among them.
template <typename Work>
void share(int64_t count, int64_t threads, const Work& work) {
    std::atomic<int64_t> next{0};
    auto some = [&] {
        for (int64_t i; (i = next++) < count;) work(i);
    };
    std::vector<std::thread> others;
    try {
        others.reserve(size_t(threads));
        for (int64_t i = 1; i < threads && i < count; i++) others.emplace_back(some);
    } catch (const std::exception&) {  // no more threads: those that there are do the work
    }
    some();
    for (auto& other : others) other.join();
}

}  // namespace

extern "C" {

// Write and publish records, in up to `threads` threads, the caller's among them.
void layertap_publish(Record* records, int64_t count, int64_t threads, Hash hash) {
    share(count, threads, [&](int64_t i) { records[i].error = publish(records[i], hash); });
}

// Copy bytes, in up to `threads` threads, the caller's among them.
void layertap_copy(char* target, const char* source, int64_t bytes, int64_t threads) {
    const int64_t count = (bytes + piece - 1) / piece;
    share(count, threads, [&](int64_t i) {
        memcpy(target + i * piece, source + i * piece, size_t(std::min(piece, bytes - i * piece)));
    });
}

// Remove the first path of each pair, and take an exclusive lock on a file under the second.
// files: out: descriptors, or -errno.
void layertap_lock(const char* const* removed, const char* const* locked, int64_t* files, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        const bool gone = unlink(removed[i]) == 0 || errno == ENOENT;
        files[i] = gone ? lock(locked[i]) : -int64_t(errno);
    }
}

void layertap_close(const int64_t* files, int64_t count) {
    for (int64_t i = 0; i < count; i++) close(int(files[i]));
}

}  // extern "C"
