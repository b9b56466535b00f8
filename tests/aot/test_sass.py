"""Parser of machine code: branches that form a loop, and the order of instructions in it."""

from sass import Code

LISTING = """
        .global         kernel
kernel:
   -:-:-:Y:01        /*0000*/                   MOV R1, c[0x0][0x28]
.L_x_1:
   -:-:-:Y:01        /*0010*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR9], R4
   1:-:-:Y:05        /*0020*/              @!P1 BRA `(.L_x_3)
.L_x_2:
   -:-:-:Y:01        /*0030*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], RZ, !UPT
   -:-:-:Y:01        /*0040*/              @UP0 UTMALDG.4D [UR24], [UR16]
   -:-:-:Y:05        /*0050*/               @P0 BRA `(.L_x_1)
   -:-:-:Y:05        /*0060*/                   EXIT
.L_x_3:
   -:-:-:Y:01        /*0070*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [R8+URZ], R7
   -:-:-:Y:05        /*0080*/              @!P1 BRA `(.L_x_3)
   -:-:-:Y:05        /*0090*/                   BRA `(.L_x_2)
.L_x_4:
   -:-:-:-:00        /*00a0*/                   BRA `(.L_x_4)
"""
"""A loop whose wait is retried after the end of the kernel."""


def test_loops_are_those_that_execution_can_go_round():
    code = Code(LISTING)
    inside = [[x.index for x in loop.instructions] for loop in code.loops]
    assert inside == [[1, 2, 3, 4, 5, 7, 8, 9], [7, 8]]
    (hot,) = code.loops_with("HGMMA")
    assert (hot.count("HGMMA"), hot.count("SYNCS"), hot.count("LDL", "STL")) == (1, 2, 0)


def test_a_wait_that_is_tried_again_still_comes_first():
    (hot,) = Code(LISTING).loops_with("UTMALDG")
    assert hot.in_order("SYNCS.PHASECHK", "HGMMA")
    assert hot.in_order("HGMMA", "UTMALDG", how_many=all)
    assert not hot.in_order("UTMALDG", "HGMMA")
    assert not hot.in_order("SYNCS", "UTMALDG", how_many=all)
    assert not hot.in_order("LDG", "HGMMA")


def test_predicates_and_parts_of_opcodes():
    wait, branch = Code(LISTING).instructions[1:3]
    assert (branch.guard, branch.text) == ("@!P1 ", "BRA `(.L_x_3)")
    assert wait.has("SYNCS")
    assert wait.has("SYNCS.PHASECHK")
    assert not wait.has("SYN")
