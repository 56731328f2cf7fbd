/* What one thread can do: read memory, and multiply out of registers with each instruction set. */

#include <stdint.h>

uint64_t read_memory(const uint64_t *from, uint64_t words) {
    uint64_t sums[32] = {0};
    for (uint64_t i = 0; i + 32 <= words; i += 32)
        for (int j = 0; j < 32; j++) sums[j] += from[i + j];
    uint64_t sum = 0;
    for (int j = 0; j < 32; j++) sum += sums[j];
    return sum;
}

/* Each function below does `rounds` times the instructions of one round, and returns the operations done: a
 * multiplication and an addition count as two. A round has twelve sums that do not depend on each other, which is
 * more than any processor's latency times its units. Instructions are written out, because a compiler would take a
 * product of constants out of the loop. The caller must know that the processor has them. All values are zeros, which
 * take as long as others do. */

#define TWELVE(OF) OF(0) OF(1) OF(2) OF(3) OF(4) OF(5) OF(6) OF(7) OF(8) OF(9) OF(10) OF(11)

#if defined(__x86_64__)

#define CLOBBERED                                                                                                    \
    "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12",       \
        "xmm13", "xmm14", "xmm15"

#define PEAK(NAME, OF, OPERATIONS)                                                                                   \
    double NAME(uint64_t rounds) {                                                                                   \
        __asm__ volatile("vzeroall" : : : CLOBBERED);                                                                \
        for (uint64_t i = 0; i < rounds; i++) __asm__ volatile(TWELVE(OF) : : : CLOBBERED);                          \
        __asm__ volatile("vzeroupper" : : : CLOBBERED);                                                              \
        return (double)rounds * 12 * (OPERATIONS);                                                                   \
    }

#define FMA_256(I) "vfmadd231ps %%ymm14, %%ymm15, %%ymm" #I "\n"
#define FMA_512(I) "vfmadd231ps %%zmm14, %%zmm15, %%zmm" #I "\n"
#define MADD_256(I) "vpmaddwd %%ymm14, %%ymm15, %%ymm13\nvpaddd %%ymm13, %%ymm" #I ", %%ymm" #I "\n"
#define DPWSSD_512(I) "vpdpwssd %%zmm14, %%zmm15, %%zmm" #I "\n"
#define DPBUSD_512(I) "vpdpbusd %%zmm14, %%zmm15, %%zmm" #I "\n"
#define DPBF16_512(I) "vdpbf16ps %%zmm14, %%zmm15, %%zmm" #I "\n"

PEAK(fma_256, FMA_256, 2 * 8)
PEAK(fma_512, FMA_512, 2 * 16)
PEAK(madd_256, MADD_256, 2 * 16)
PEAK(dpwssd_512, DPWSSD_512, 2 * 32)
PEAK(dpbusd_512, DPBUSD_512, 2 * 64)
PEAK(dpbf16_512, DPBF16_512, 2 * 32)

/* Products of 16 x 32 by 32 x 16 (bf16), or of 16 x 64 by 64 x 16 (int8). There are only four sums, because tiles are
 * eight: Linux must have granted them to this process, which loading the native kernels asks for. */
#define TILE_PEAK(NAME, INSTRUCTION, OPERATIONS)                                                                     \
    double NAME(uint64_t rounds) {                                                                                   \
        struct {                                                                                                     \
            uint8_t palette, start_row, reserved[14];                                                                \
            uint16_t bytes[16];                                                                                      \
            uint8_t rows[16];                                                                                        \
        } shape __attribute__((aligned(64))) = {.palette = 1};                                                       \
        for (int i = 0; i < 8; i++) {                                                                                \
            shape.bytes[i] = 64;                                                                                     \
            shape.rows[i] = 16;                                                                                      \
        }                                                                                                            \
        __asm__ volatile("ldtilecfg %0" : : "m"(shape)); /* the tiles are zeros now */                               \
        for (uint64_t i = 0; i < rounds; i++)                                                                        \
            __asm__ volatile(INSTRUCTION " %%tmm6, %%tmm4, %%tmm0\n" INSTRUCTION " %%tmm7, %%tmm4, %%tmm1\n"         \
                             INSTRUCTION " %%tmm6, %%tmm5, %%tmm2\n" INSTRUCTION " %%tmm7, %%tmm5, %%tmm3" : :);     \
        __asm__ volatile("tilerelease" : :);                                                                         \
        return (double)rounds * 4 * (OPERATIONS);                                                                    \
    }

TILE_PEAK(tile_bf16, "tdpbf16ps", 2 * 16 * 16 * 32)
TILE_PEAK(tile_int8, "tdpbssd", 2 * 16 * 16 * 64)

#endif
