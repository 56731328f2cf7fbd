/* What one thread can do: read memory, and multiply bfloat16 matrices out of registers or the first cache. */

#include <stdint.h>

uint64_t read_memory(const uint64_t *from, uint64_t words) {
    uint64_t sums[32] = {0};
    for (uint64_t i = 0; i + 32 <= words; i += 32)
        for (int j = 0; j < 32; j++) sums[j] += from[i + j];
    uint64_t sum = 0;
    for (int j = 0; j < 32; j++) sum += sums[j];
    return sum;
}

#if defined(__AMX_BF16__) && defined(__linux__)

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Asks Linux for the tile registers (ARCH_REQ_XCOMP_PERM of XFEATURE_XTILEDATA); 0 if it grants them. */
int64_t matmul_prepare(void) { return syscall(SYS_arch_prctl, 0x1023, 18); }

/* `rounds` times four independent products of 16 x 32 by 32 x 16; returns the operations done. */
double matmul(uint64_t rounds) {
    static const uint16_t zeros[16 * 32] __attribute__((aligned(64)));
    struct { uint8_t palette, start_row, reserved[14]; uint16_t bytes[16]; uint8_t rows[16]; } shape
        __attribute__((aligned(64))) = {.palette = 1};
    for (int i = 0; i < 8; i++) { shape.bytes[i] = 64; shape.rows[i] = 16; }
    __asm__ volatile("" : : "r"(&shape) : "memory"); /* GCC's intrinsic admits to reading 8 bytes of it only */
    _tile_loadconfig(&shape);
    _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
    _tile_loadd(4, zeros, 64); _tile_loadd(5, zeros, 64); _tile_loadd(6, zeros, 64); _tile_loadd(7, zeros, 64);
    for (uint64_t i = 0; i < rounds; i++) {
        _tile_dpbf16ps(0, 4, 6); _tile_dpbf16ps(1, 4, 7); _tile_dpbf16ps(2, 5, 6); _tile_dpbf16ps(3, 5, 7);
    }
    _tile_release();
    return (double)rounds * 4 * 2 * 16 * 16 * 32;
}

#else

int64_t matmul_prepare(void) { return -1; }
double matmul(uint64_t rounds) { (void)rounds; return 0; }

#endif
