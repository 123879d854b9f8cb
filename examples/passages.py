"""Fourteen short passages, each with what the prompts in make_prompts.py ask about it."""

from __future__ import annotations

from typing import NamedTuple


class Passage(NamedTuple):
    title: str
    text: str
    replace: tuple[str, str]
    """A word of the text and what a rewriting prompt asks to put in its place."""
    question: str
    extract: str
    """What an extraction prompt asks for."""


PASSAGES = (
    Passage(
        "The lighthouse at Carrow Point",
        "The lighthouse at Carrow Point was finished in 1871 after four years of work. Its tower is 38 metres "
        "tall and was built from grey granite that came by barge from a quarry forty kilometres to the south. For "
        "the first sixty years the lamp burned oil, and a keeper named Thomas Hale climbed the 212 steps twice "
        "every night to trim the wick. The lamp was changed to electricity in 1932, and the last keeper left in "
        "1984. Today the lighthouse is run by a small trust, and visitors may climb to the gallery between May "
        "and September.",
        ("lighthouse", "watchtower"),
        "When was the lamp changed to electricity, and how many steps did the keeper climb?",
        "every year mentioned, with what happened in it",
    ),
    Passage(
        "Meeting notes of the harbour committee",
        "The harbour committee met on Tuesday, 14 March. Present were Ines Duarte (chair), Paul Okafor, Mina Sato "
        "and Greta Lindqvist. Paul reported that the repair of the north pier will cost 48,500 euros, 6,000 more "
        "than planned, because the old piles were rotten. Mina proposed to pay the difference out of the reserve. "
        "The proposal was accepted by three votes to one. Greta will ask two companies for offers on new lamps "
        "before the end of April. The next meeting is on Tuesday, 11 April, at 18:30 in the library.",
        ("harbour", "market"),
        "Who will ask for offers, what for, and by when?",
        "the names of all people present",
    ),
    Passage(
        "How sourdough rises",
        "Sourdough bread rises without added yeast. The baker keeps a starter, a mixture of flour and water in "
        "which wild yeast and bacteria live together. The yeast eats sugar and gives off carbon dioxide, and the "
        "bubbles of gas lift the dough. The bacteria make lactic and acetic acid, and the acid gives the bread "
        "its sour taste and keeps it from spoiling. A starter must be fed with fresh flour and water, usually "
        "once a day at room temperature or once a week in the refrigerator. A warm kitchen makes the dough rise "
        "faster, and a cool one gives it more flavour.",
        ("baker", "cook"),
        "What makes the bread sour, and what makes it rise?",
        "the living things and the substances that are mentioned",
    ),
    Passage(
        "The walking route around Lake Orre",
        "The route around Lake Orre is 23 kilometres long and takes most walkers between six and seven hours. It "
        "starts at the car park in Velden, follows the eastern shore through a beech forest, and reaches the old "
        "stone bridge after nine kilometres. From the bridge the path climbs 240 metres to the Falcon Rock, where "
        "there is a shelter but no water. The western shore is flat and sunny and has three places to swim. The "
        "last bus back to Velden leaves the village of Tarn at 19:10 on weekdays and at 17:40 on Sundays.",
        ("path", "trail"),
        "How far is it to the bridge, and when does the last bus leave on a Sunday?",
        "every distance and every time of day",
    ),
    Passage(
        "Why the sea is salt",
        "Rain is slightly acid, because it takes up carbon dioxide from the air. When it runs over rock it "
        "dissolves small amounts of minerals, and rivers carry them to the sea. Water leaves the sea again by "
        "evaporation, but the minerals stay behind, so over millions of years the sea became salt. Hot springs on "
        "the sea floor add more minerals. The sea does not become saltier without end, because animals use some "
        "of the minerals for their shells and others settle as mud on the bottom. One litre of sea water holds "
        "about 35 grams of salt.",
        ("minerals", "salts"),
        "Why do the minerals stay in the sea, and why does it not become saltier without end?",
        "each step by which minerals reach or leave the sea",
    ),
    Passage(
        "A letter to the landlord",
        "Dear Mr. Novak, I am writing about the heating in flat 12 at 8 Mill Street. Since Monday, 6 November, "
        "the radiator in the bedroom has been cold, and the one in the kitchen makes a loud knocking noise at "
        "night. I called your office on Tuesday and on Thursday and left a message both times, but nobody has "
        "called me back. It is now 14 degrees in the bedroom. Please send someone to repair the heating this "
        "week. I am at home every day after 16:00, and you can reach me at 555-0143. Kind regards, Hanna Berg",
        ("heating", "boiler"),
        "What does the writer want, and when can she be reached at home?",
        "sender, recipient, address, telephone number and problem",
    ),
    Passage(
        "The swift",
        "The swift spends almost its whole life in the air. It eats, drinks, collects feathers for its nest and "
        "even sleeps while it flies. A young swift that leaves the nest may not land again for two or three "
        "years, until it is old enough to breed. Swifts arrive in northern Europe in early May, raise two or "
        "three young under the roofs of tall buildings, and leave for Africa in early August. Because new "
        "buildings have no gaps under the roof, the number of swifts has fallen by half in thirty years. A wooden "
        "box under the eaves is enough to help a pair.",
        ("swift", "swallow"),
        "Why has the number of swifts fallen, and what helps?",
        "the months and the numbers that are mentioned, with what they refer to",
    ),
    Passage(
        "Release notes of a photo program",
        "Version 4.2 of Lumen opens large folders three times faster than version 4.1. The crop tool now "
        "remembers the last aspect ratio, and pressing the R key turns the picture by 90 degrees. Three errors "
        "were repaired: the program no longer closes when a memory card is removed, the date of pictures from the "
        "year 1999 is shown correctly, and the print preview uses the right paper size. Lumen 4.2 needs 4 "
        "gigabytes of memory and no longer runs on 32-bit systems. Settings from version 4.1 are kept.",
        ("picture", "photo"),
        "What is new in the crop tool, and which systems are no longer supported?",
        "the repaired errors as a numbered list",
    ),
    Passage(
        "The bridge builders",
        "Elena Marsh and her brother David started to build wooden bridges in 2003, when a flood had carried away "
        "the footbridge to their farm. The first one took them eleven weeks. A neighbour asked for another, and "
        "then the village of Holm ordered three. Today their company has nine employees and has built 164 bridges "
        "in five countries. Every bridge is made of larch wood, which lasts for decades without paint. Elena "
        "draws the plans, David leads the work on site, and neither of them has ever studied engineering.",
        ("bridge", "footbridge"),
        "Why did they start, and what does each of them do today?",
        "every number, with what it counts",
    ),
    Passage(
        "Instructions for the coffee machine",
        "Fill the tank with cold water up to the upper mark and switch the machine on. Wait until the green light "
        "stops blinking. Put a cup under the spout, choose the strength with the round knob, and press the start "
        "button. If the red light blinks, the tank is empty; if it stays on, the tray is full and must be "
        "emptied. Clean the milk tube every evening with warm water. Once a month, run the cleaning program: put "
        "one tablet into the tank, press start and strength together for five seconds, and let the program run "
        "for twenty minutes.",
        ("machine", "coffee maker"),
        "What does a blinking red light mean, and what does a steady one mean?",
        "the steps of the monthly cleaning as a numbered list",
    ),
    Passage(
        "The night train",
        "The night train from Marlow to Estra runs again after a break of twelve years. It leaves Marlow at 21:15 "
        "every day except Saturday and arrives in Estra at 8:40 the next morning. A seat costs 39 euros, a bed in "
        "a cabin for four costs 69 euros, and a cabin of one's own costs 149 euros; breakfast is part of the "
        "price of a bed. The train has nine cars and room for 310 people. In the first month 81 percent of the "
        "beds were sold, and the railway plans a second night train to the coast for next summer.",
        ("train", "express"),
        "How long is the journey, and what does a bed in a cabin for four cost?",
        "a table of prices with one line for each kind of place",
    ),
    Passage(
        "Keeping bees in the city",
        "Bees in the city often make more honey than bees in the country, because parks, balconies and street "
        "trees flower from March to October. A hive needs a sunny place, water nearby and about two square metres "
        "of room. A beginner should join a club, buy a calm colony in May and expect to spend an hour a week on "
        "it. In a good year one hive gives twenty kilograms of honey. The worst enemy is a mite named varroa, "
        "which must be treated after the last harvest in July. Two hives are better than one, because a weak "
        "colony can be helped by a strong one.",
        ("hive", "beehive"),
        "What does a hive need, and when must the mite be treated?",
        "advice for a beginner as short bullet points",
    ),
    Passage(
        "A small theatre",
        "The Lantern Theatre has sixty-four seats and no curtain. It was opened in 1996 in a former bicycle shop "
        "by Ruth Adeyemi, who had just lost her job as an actress. In the beginning she sold the tickets, played "
        "the leading part and swept the floor. The theatre shows six plays a year, two of them new. Half of its "
        "money comes from tickets, a third from the city, and the rest from friends who each pay 50 euros a year. "
        "When the roof leaked in 2015, the audience brought umbrellas, and not one evening was cancelled.",
        ("theatre", "playhouse"),
        "Where does the money of the theatre come from?",
        "the sources of money and their shares",
    ),
    Passage(
        "How a refrigerator works",
        "A refrigerator does not make cold; it moves heat. A liquid called the refrigerant flows through a thin "
        "tube inside the cabinet, where it evaporates and takes up heat. A compressor then presses the gas "
        "together, which makes it hot, and pumps it through a black grille at the back. There the gas gives its "
        "heat to the room and becomes liquid again. A narrow valve lets the liquid return to the low pressure "
        "inside, and the cycle starts again. This is why the back of a refrigerator is warm, and why opening its "
        "door does not cool a kitchen.",
        ("refrigerator", "freezer"),
        "Why is the back of a refrigerator warm?",
        "the parts of the machine and the job of each",
    ),
)
